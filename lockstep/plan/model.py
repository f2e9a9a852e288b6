"""One model of a step on the ranks of its pool, and what the plan asks of the engine that trains it or computes with it.

`lockstep/plan/layouts/` has a `TrainLayout` for each training engine: its memory and the communication of its ranks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from lockstep.config.model import TrainEngineConfig
from lockstep.kernels.activation_memory import STREAM_BYTES
from lockstep.plan.adapters import Adapters, FourBitBase
from lockstep.plan.batch_units import BatchUnits
from lockstep.plan.hardware import Device
from lockstep.plan.model_shape import ModelShape

Parts = dict[str, float]
"""What memory is used for -> bytes."""


@dataclass(frozen=True)
class Resident:
    """Bytes that stay on the device between phases."""

    weights: float
    moments: float
    gradients: float = 0.0


@dataclass(frozen=True)
class Model:
    """One model on the ranks of its pool.

    machines:        that the ranks are on.
    master, compute: bytes per parameter of the master weights and of what computes.
    layout:          how its engine distributes it over the ranks.
    update:          units of an optimizer step; None for a model that is not trained.
    passes:          phase without gradient -> its units.
    updates:         optimizer steps in a training step.
    decodes:         whether it generates the rollouts.
    adapters:        trained instead of its parameters.
    four_bit:        the part of the frozen parameters that is in 4 bits.
    is_scalar:       has a head to one number, not to the vocabulary.
    """

    role: str
    pool: str
    ranks: int
    machines: int
    shape: ModelShape
    master: int
    compute: int
    layout: "TrainLayout"
    engine: TrainEngineConfig
    checkpointing: bool
    update: BatchUnits | None = None
    passes: dict[str, BatchUnits] = field(default_factory=dict)
    updates: int = 0
    decodes: bool = False
    adapters: Adapters | None = None
    four_bit: FourBitBase | None = None
    is_scalar: bool = False

    @property
    def num_trained(self) -> int:
        """Parameters with a gradient and moments."""
        if self.update is None:
            return 0
        return self.shape.parameters if self.adapters is None else self.adapters.parameters

    @property
    def num_frozen(self) -> int:
        return self.shape.parameters if self.update is None or self.adapters is not None else 0

    @property
    def num_adapters(self) -> int:
        """Parameters of the adapters."""
        return 0 if self.adapters is None else self.adapters.parameters

    @property
    def four_bit_bytes(self) -> float:
        """Bytes of the weights in 4 bits, which are not sharded."""
        return 0.0 if self.four_bit is None else self.four_bit.bytes

    @property
    def num_wide(self) -> int:
        """Parameters that are not in 4 bits, without adapters."""
        return self.shape.parameters - (0 if self.four_bit is None else self.four_bit.parameters)

    def layer_bytes(self, num_tokens: int) -> int:
        """What the forward of one layer keeps for the backward."""
        entries = 0 if self.adapters is None else self.adapters.layer_entries
        if self.four_bit is not None:  # its modules keep the activated gate and its product with up, too
            entries += 2 * self.shape.active_experts * self.shape.inner
        return self.shape.activation_bytes(num_tokens, self.compute) + num_tokens * entries * self.compute

    def gradient_bytes(self, num_tokens: int) -> int:
        """What the backward of one layer holds at most besides what the forward kept: the gradients of the stream, and of gate, up
        and their product."""
        shape = self.shape
        entries = 3 * shape.active_experts * shape.inner + shape.width
        return num_tokens * (entries * self.compute + shape.width * STREAM_BYTES)


class TrainLayout(ABC):
    """How a training engine distributes a model over the ranks of its pool. Bytes and seconds are those of one device, the one
    with most.

    shards:       ranks that a copy of the weights is distributed over.
    row_ranks:    ranks that compute on the same rows.
    lends:        the rollout of the same process decodes with the tensors that compute; otherwise it gets a copy.
    """

    shards: int
    row_ranks: int
    lends: bool

    @abstractmethod
    def resident(self, model: Model, *, is_active: bool, updates: bool) -> Resident:
        """is_active: it computes now. updates: it is trained now."""

    @abstractmethod
    def forward(self, device: Device, model: Model, units: BatchUnits) -> Parts:
        """Added by a pass without gradients."""

    @abstractmethod
    def update(self, device: Device, model: Model, units: BatchUnits, others: float) -> Parts:
        """Added by an update. others: bytes that are on the device already."""

    @abstractmethod
    def recomputed(self, model: Model, activations: float) -> float:
        """Share of the layers that the backward pass computes again. activations: bytes of the update."""

    @abstractmethod
    def optimized(self, model: Model) -> float:
        """Parameters that a rank's optimizer step changes."""

    @abstractmethod
    def overlapped(self, device: Device, model: Model, units: BatchUnits, *, updates: bool) -> float:
        """Seconds of communication while layers compute, in a pass or, with `updates`, in an optimizer step."""

    def exchanged(self, device: Device, model: Model, units: BatchUnits, passes: float) -> float:
        """Seconds of communication that layers wait for. passes: forwards' worth of work."""
        return 0.0

    @property
    def product_ranks(self) -> int:
        """Ranks that divide the products of a token's layers between them."""
        return 1

    def bubble(self, units: BatchUnits) -> float:
        """How much longer a pass takes because stages wait for each other."""
        return 1.0


def link(device: Device, model: Model, group: int) -> float:
    """Bytes per second of a collective of `group` consecutive ranks."""
    per_machine = model.ranks // model.machines
    return device.peer_link if group <= per_machine else min(device.peer_link, per_machine * device.network)
