"""The interface of training engines. The caller passes the loss; an engine knows nothing about the algorithm.

    batch (rows on the host) ─► micro-batches ─► model ─► outputs (B, R) ─► loss_fn ─► backward ─► … ─► optimizer_step

The result does not depend on the micro-batch split: a loss function returns its micro-batch's share of the loss and of each
metric, already divided by counts over the whole mini-batch and all ranks, and the engine sums the shares.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

LossFn = Callable[[dict[str, Tensor], TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""(model outputs of a micro-batch, its rows) -> (its share of the loss, its share of each metric)."""

PARTS = ("model", "optimizer", "extra")
"""Parts of an engine's checkpoint."""


@dataclass(frozen=True)
class MicroBatching:
    """How to split rows: `max_tokens` fills micro-batches by tokens; otherwise `num_rows` rows each (None: all at once).

    group_size: rows that follow each other in groups of this size stay in one micro-batch, for a loss that compares them;
                `num_rows` is a multiple of it.
    """

    num_rows: int | None = None
    max_tokens: int | None = None
    group_size: int = 1


class TrainEngine(ABC):
    """One model with its optimizer on this rank's device.

    Ranks form groups of equal size that compute on the same rows (sequence parallelism); one group is one data-parallel rank.

    dp_rank, dp_size: which of `dp_size` shares of the rows this rank computes on.
    sp_rank:          its index among the ranks that share those rows.
    """

    dp_rank: int
    dp_size: int
    sp_rank: int

    @abstractmethod
    def forward(self, batch: TensorDict, micro: MicroBatching, **options: object) -> dict[str, Tensor]:
        """Outputs for every row, in the order of `batch`, on the host and without gradient.

        Collective, like everything that computes: every rank needs the same number of rows; pad with rows of one token.
        """

    @abstractmethod
    def forward_backward(
        self, batch: TensorDict, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        """Accumulate the gradient of one mini-batch; returns the summed metrics."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip, step, clear the gradient; returns the gradient norm before clipping.

        In float16 a norm that is not finite skips the step and lowers the loss scale; otherwise it is a FloatingPointError.
        """

    @abstractmethod
    def schedule_step(self) -> None:
        """Advance the learning rate by one training step."""

    @property
    @abstractmethod
    def learning_rate(self) -> float: ...

    @abstractmethod
    def global_sum(self, *values: float) -> tuple[float, ...]:
        """Each value summed over the data-parallel ranks."""

    @abstractmethod
    def lend_weights(self, module: PreTrainedModel) -> AbstractContextManager[None]:
        """Give the rollout's module the current weights inside the context, shared or copied; collective."""

    @abstractmethod
    def adapters_off(self) -> AbstractContextManager[None]:
        """A model with LoRA adapters computes as its base inside: the reference policy."""

    @abstractmethod
    def weights(self, *, trained: bool = False) -> Generator[tuple[str, Tensor]]:
        """Whole parameters by Hugging Face name, one at a time, tied ones once; all ranks iterate together.

        trained: without those that are frozen, such as the base of LoRA adapters.
        """

    @abstractmethod
    def offload(self) -> None:
        """Move to host memory what the config offloads between phases."""

    @abstractmethod
    def onload(self, *, optimizer: bool = False, ahead: bool = False) -> None:
        """Bring back the weights that compute. optimizer: for an update or a checkpoint, the master weights too.

        Offloaded optimizer state stays in host memory: `optimizer_step` streams it, `save` and `load` use it there.
        ahead: the masters are copied while gradients are computed; `optimizer_step` waits for them.
        """

    @abstractmethod
    def save(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        """Write the named parts: model, optimizer, extra (schedule, loss scale, RNG state)."""

    @abstractmethod
    def load(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        """Read the named parts of a saved checkpoint, at any world size."""
