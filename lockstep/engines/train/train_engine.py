"""The interface of training engines, and their registry. The caller passes the loss; an engine knows nothing about the algorithm.

    create_train_engine(strategy, EngineModel, device) ─► TrainEngine

    batch (rows on the host) ─► micro-batches ─► model ─► outputs (B, R) ─► loss_fn ─► backward ─► … ─► optimizer_step

The result does not depend on the micro-batch split: a loss function returns its micro-batch's share of the loss and of each
metric, already divided by counts over the whole mini-batch and all ranks, and the engine sums the shares.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config.engines import TRAIN_ENGINES, TrainEngineInfo
from lockstep.config.model import FSDPOptimizerConfig, HFModelConfig, TrainEngineConfig
from lockstep.protocol.columns import Batch

LossFn = Callable[[dict[str, Tensor], TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""(model outputs of a micro-batch, its rows) -> (its share of the loss, its share of each metric).

If it collects anything besides, it has a method `restart()`, which drops what the micro-batches of the mini-batch have added: it is
called before a mini-batch is computed again in smaller micro-batches, after it ran out of memory."""

PARTS = ("model", "optimizer", "extra")
"""Parts of an engine's checkpoint."""


@dataclass(frozen=True)
class MicroBatching:
    """How to split rows: `max_tokens` fills micro-batches by tokens; otherwise `num_rows` rows each (None: all at once).

    group_size: rows that follow each other in groups of this size stay in one micro-batch, for a loss that compares them;
                `num_rows` is a multiple of it.
    key:        the config key of `max_tokens`, or else of `num_rows`, in groups.
    """

    num_rows: int | None = None
    max_tokens: int | None = None
    group_size: int = 1
    key: str = ""

    @property
    def limit_name(self) -> str:
        """The key, or else the kind of the size."""
        return self.key or ("num_rows" if self.max_tokens is None else "max_tokens")


@dataclass(frozen=True)
class EngineModel:
    """Which model an engine holds and how it is trained.

    config:     its weights, adapters, packing and gradient checkpointing.
    key:        the dotted key of `config`, for messages: "critic.model".
    kind:       what it computes. policy: log-probs and entropy of response tokens; value: a value before each response token, by
                the folder's `score` head or a new one; reward: the same outputs, and the folder must have the head.
    engine:     settings of the engine: the section of the role that its `TrainEngineInfo` names.
    optim:      None for a model that only computes: a reference or a reward model.
    clip_grad:  gradients are clipped to this norm.
    sequence_parallel_size: ranks that split each sequence.
    max_length: of the run's sequences; None if it is not known.
    router_key: the config key, for messages, that reads or replaces what the routers of a mixture of experts choose; then a policy
                has the options `routes` and `router_loss` of `PolicyModel.forward`. None: no key does.
    """

    config: HFModelConfig
    key: str
    kind: Literal["policy", "value", "reward"]
    engine: TrainEngineConfig
    optim: FSDPOptimizerConfig | None = None
    clip_grad: float = 1.0
    sequence_parallel_size: int = 1
    max_length: int | None = None
    router_key: str | None = None


class TrainEngine(ABC):
    """One model with its optimizer on this rank's device.

    Ranks form groups of equal size that compute on the same rows (sequence, tensor or pipeline parallelism); one group is one
    data-parallel rank.

    dp_rank, dp_size: which of `dp_size` shares of the rows this rank computes on.
    group_rank:       its index among the ranks that share those rows; all of them return the same outputs.
    info:             what it can do.
    """

    info: ClassVar[TrainEngineInfo] = TrainEngineInfo()
    dp_rank: int
    dp_size: int
    group_rank: int

    @classmethod
    @abstractmethod
    def open(cls, model: EngineModel, device: torch.device) -> Self:
        """Load the model on this rank. Collective; every rank of the role calls it with the same arguments."""

    @abstractmethod
    def forward(self, batch: Batch, micro: MicroBatching, **options: object) -> dict[str, Tensor]:
        """Outputs for every row, in the order of `batch`, on the host and without gradient.

        `batch[rows].to_tensordict()` are the padded tensors of some rows.

        Collective, like everything that computes: every rank needs the same number of rows; pad with rows of one token.
        """

    @abstractmethod
    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, micro: MicroBatching, **options: object
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
    def rollout_module(self) -> PreTrainedModel:
        """A policy's module for a rollout engine that shares weights, without memory for them; see `lend_weights`."""

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
    def merged_weights(self) -> Generator[tuple[str, Tensor]]:
        """All weights of a model without adapters that computes the same, as `save_pretrained` writes them. Collective."""

    @abstractmethod
    def weight_shapes(self, *, merged: bool) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of `merged_weights`, or of the trained `weights`."""

    def step_counts(self) -> tuple[int, int] | None:
        """Steps so far, as the optimizer and the schedule count them themselves; None if they do not."""
        return None

    def trained_tensors(self) -> dict[str, Tensor]:
        """What the optimizer updates, under any names that stay the same; empty if it cannot be read."""
        return {}

    def frozen_tensors(self) -> dict[str, Tensor]:
        """Parameters that are not trained and buffers, as this rank holds them; empty if they cannot be read."""
        return {}

    def copied_tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Master weights and their copies that compute; empty if there are none."""
        return {}

    def lent_weights(self, number: int) -> Iterator[tuple[str, Tensor]]:
        """Inside `lend_weights`: weights as they compute, whole, by their names in the rollout's module. Collective.

        All that the module shares; of those that it has copies of, two from the `number`-th on; none if they cannot be read.
        """
        return iter(())

    def offload(self) -> None:  # noqa: B027 - an engine may keep everything where it is
        """Move to host memory what the config offloads between phases."""

    def onload(self, *, optimizer: bool = False, ahead: bool = False) -> None:  # noqa: B027
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

    @abstractmethod
    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write `huggingface`, a folder that transformers opens, or of a model with adapters `lora_adapter`, which peft opens."""


def create_train_engine(name: str, model: EngineModel, device: torch.device) -> TrainEngine:
    """name: `fsdp`, another registered engine, or `file.py:Class`."""
    engine: TrainEngine = TRAIN_ENGINES.get(name).open(model, device)
    return engine
