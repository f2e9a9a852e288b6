"""DeepSpeed's ZeRO: from stage 1 on masters and moments are sharded over all ranks, from 2 on gradients, at 3 the weights too.

Layers, head and checkpointing are those of the FSDP engine.
"""

from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.kernels.activation_memory import GRADIENT_BYTES, gathered_bytes
from lockstep.plan.batch_units import BatchUnits
from lockstep.plan.hardware import Device
from lockstep.plan.layouts import layers
from lockstep.plan.model import Model, Parts, Resident, TrainLayout, link
from lockstep.plan.model_shape import ModelShape

MASTER_BYTES = 4
"""Masters are float32 copies, also of weights that compute in float32."""
BUCKET = 500_000_000
"""Gradients that are reduced together (`reduce_bucket_size`), from stage 1 on; stage 3 has no more of them than parameters."""


WHOLE = 100_000
"""Parameters with fewer entries stay whole at stage 3, beside their shards (`stage3_param_persistence_threshold`)."""


class DeepSpeedLayout(TrainLayout):
    def __init__(self, config: DeepSpeedEngineConfig, ranks: int) -> None:
        self.config = config
        self.ranks = ranks
        self.shards = ranks if config.zero_stage == 3 else 1
        self.row_ranks = config.ranks_per_row
        self.lends = config.zero_stage < 3

    def resident(self, model: Model, *, is_active: bool, updates: bool) -> Resident:
        engine = self.config
        is_trained = model.num_trained > 0
        on_device = (is_active or not engine.param_offload) if not is_trained else not engine.param_offload
        whole = _small_parameters(model.shape) if self.shards > 1 else 0
        weights = on_device * model.compute * (model.shape.parameters / self.shards + whole)
        if not is_trained:
            return Resident(weights, 0.0)
        own = self.optimized(model)
        masters = MASTER_BYTES * own if engine.zero_stage else 0.0
        moments = 2 * MASTER_BYTES * own
        if engine.optimizer_offload:
            return Resident(weights, 0.0)
        return Resident(weights + masters, moments)

    def forward(self, device: Device, model: Model, units: BatchUnits) -> Parts:
        return layers.forward_parts(device, model, units, self._gathered(model))

    def update(self, device: Device, model: Model, units: BatchUnits, others: float) -> Parts:
        engine = self.config
        size = model.num_trained / (self.ranks if engine.zero_stage >= 2 else 1)
        parts = layers.update_parts(
            device,
            model,
            units,
            others,
            gradients=GRADIENT_BYTES * size,
            gathered=self._gathered(model),
            saves_memory=engine.param_offload or engine.optimizer_offload or device.is_cpu,
        )
        if engine.zero_stage:
            parts["gradient buckets"] = model.compute * min(BUCKET, model.num_trained)
        return parts

    def _gathered(self, model: Model) -> float:
        if self.shards == 1:
            return 0.0
        shape = model.shape
        outside = shape.parameters - shape.layers * shape.layer_parameters
        return gathered_bytes(shape.layer_parameters, outside, 0, model.compute)

    def recomputed(self, model: Model, activations: float) -> float:
        return layers.recomputed(model, activations)

    def optimized(self, model: Model) -> float:
        return model.num_trained / (self.ranks if self.config.zero_stage else 1)

    def overlapped(self, device: Device, model: Model, units: BatchUnits, *, updates: bool) -> float:
        """Stage 3 gathers weights like FSDP; below it new weights are gathered once, and stage 1 reduces gradients once."""
        if self.ranks == 1:
            return 0.0
        speed, size = link(device, model, self.ranks), model.shape.parameters
        sharded = self.config.zero_stage == 3
        gathers = units.num_micro * (2 if updates else 1) * model.compute * size if sharded else 0.0
        if not updates:
            return gathers / speed
        times = units.num_micro if self.config.zero_stage >= 2 else 1
        gathers += 0.0 if sharded else model.compute * size
        return (gathers + times * GRADIENT_BYTES * model.num_trained) / speed


def _small_parameters(shape: ModelShape) -> int:
    """Of all layers."""
    queries, keys = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
    inner = shape.inner * shape.experts  # experts are one tensor
    linear = [shape.width * size for size in (queries, keys, keys, queries, inner, inner, inner)]
    return shape.layers * (shape.norm_parameters + sum(size for size in linear if size < WHOLE))
