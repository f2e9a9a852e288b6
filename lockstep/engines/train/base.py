"""What a training engine offers. It is handed the loss; it knows nothing of the algorithm.

    batch (rows on the host) ─► micro-batches ─► model ─► outputs (B, R) ─► loss_fn ─► backward ─► … ─► optimizer_step

The result does not depend on how rows are cut into micro-batches: a loss function returns its micro-batch's share of the loss
and of each metric, already divided by counts over the whole mini-batch and all ranks, and the engine adds the shares up.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tensordict import TensorDict
from torch import Tensor, nn

LossFn = Callable[[dict[str, Tensor], TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""(model outputs of a micro-batch, its rows) -> (its share of the loss, its share of each metric)."""

PARTS = ("model", "optimizer", "extra")
"""What an engine's checkpoint holds."""


@dataclass(frozen=True)
class MicroBatching:
    """How rows are cut: `max_tokens` fills micro-batches by tokens; otherwise `num_rows` rows each (None: all at once)."""

    num_rows: int | None = None
    max_tokens: int | None = None


class TrainEngine(ABC):
    """One model with its optimizer on this rank's device.

    Ranks stand in groups of equal size that compute on the same rows (sequence parallelism); one group is one data-parallel rank.

    dp_rank, dp_size: which rows this rank computes on, of how many shares.
    sp_rank:          its place among the ranks that share those rows.
    """

    dp_rank: int
    dp_size: int
    sp_rank: int

    @abstractmethod
    def forward(self, batch: TensorDict, micro: MicroBatching, **options: object) -> dict[str, Tensor]:
        """Outputs for every row, in the order of `batch`, on the host and without gradient.

        Collective, as all that computes: every rank is given as many rows, if only padding of one token that predicts nothing.
        """

    @abstractmethod
    def forward_backward(
        self, batch: TensorDict, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        """Add the gradient of one mini-batch; returns the summed metrics."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip, step, clear the gradient; returns the gradient norm before clipping."""

    @abstractmethod
    def schedule_step(self) -> None:
        """Move the learning rate on by one training step."""

    @property
    @abstractmethod
    def learning_rate(self) -> float: ...

    @abstractmethod
    def global_sum(self, *values: float) -> tuple[float, ...]:
        """Each value summed over the data-parallel ranks."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[nn.Module]:
        """The model with whole parameters in the compute type, for the span of the context; all ranks enter and leave."""

    @abstractmethod
    def weights(self) -> Generator[tuple[str, Tensor]]:
        """Whole parameters by their Hugging Face names, one at a time, tied ones once; all ranks go through them together."""

    @abstractmethod
    def offload(self) -> None:
        """Move what the config asks for to host memory."""

    @abstractmethod
    def onload(self, *, optimizer: bool = False, ahead: bool = False) -> None:
        """Bring back what computes and, for an update or a checkpoint, the master weights and the optimizer's state.

        ahead: these two are on their way while gradients are computed; `optimizer_step` waits for them.
        """

    @abstractmethod
    def save(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        """Write the named parts: model, optimizer, extra (schedule and RNG state)."""

    @abstractmethod
    def load(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        """Read the named parts of what `save` wrote, at any world size."""
