"""FSDP2: masters, moments and gradients are sharded over `fsdp_size` ranks; a layer's weights are gathered when it computes."""

from lockstep.config.model import FSDPEngineConfig
from lockstep.kernels.activation_memory import GRADIENT_BYTES, gathered_bytes
from lockstep.plan.batch_units import BatchUnits
from lockstep.plan.hardware import Device
from lockstep.plan.layouts import layers
from lockstep.plan.model import Model, Parts, Resident, TrainLayout, link

MOMENT_BUCKET = 2**28
"""Offloaded moments stream through three buckets of both."""


class FsdpLayout(TrainLayout):
    def __init__(self, config: FSDPEngineConfig, ranks: int) -> None:
        self.config = config
        self.shards = ranks if config.fsdp_size == -1 else config.fsdp_size
        self.row_ranks = config.ranks_per_row
        self.lends = ranks == 1 and not config.offload_policy

    def resident(self, model: Model, *, is_active: bool, updates: bool) -> Resident:
        engine, shards = self.config, self.shards
        if engine.offload_policy:
            return Resident(0.0, 0.0)
        on_device = is_active or not engine.param_offload
        frozen = 0.0
        if model.num_frozen:
            frozen = on_device * (model.compute * model.num_wide / shards + model.four_bit_bytes)
        copied = self.lends and model.master != model.compute  # one process computes on a copy of the masters
        masters_are_there = not engine.param_offload or (is_active and (updates or not copied))
        trained = masters_are_there * model.master * model.num_trained / shards
        trained += on_device * copied * model.compute * model.num_trained
        moments = 0.0 if engine.optimizer_offload else 2 * model.master * model.num_trained / shards
        return Resident(frozen + trained, moments)

    def forward(self, device: Device, model: Model, units: BatchUnits) -> Parts:
        return layers.forward_parts(device, model, units, self._gathered(model))

    def update(self, device: Device, model: Model, units: BatchUnits, others: float) -> Parts:
        engine = self.config
        offloads = engine.param_offload or engine.optimizer_offload or engine.offload_policy
        parts = layers.update_parts(
            device,
            model,
            units,
            others,
            gradients=0.0 if engine.offload_policy else GRADIENT_BYTES * model.num_trained / self.shards,
            gathered=self._gathered(model, updates=True),
            saves_memory=offloads or device.is_cpu or model.four_bit is not None,
        )
        if engine.optimizer_offload and not engine.offload_policy and not device.is_cpu:
            parts["moment buckets"] = 2 * min(3 * MOMENT_BUCKET, model.master * model.num_trained / self.shards)
        return parts

    def _gathered(self, model: Model, *, updates: bool = False) -> float:
        if self.shards == 1 and not self.config.offload_policy:
            return 0.0
        shape = model.shape
        outside = shape.parameters - shape.layers * shape.layer_parameters
        sends_layers = updates and model.adapters is None
        sent = max(shape.layer_parameters, outside) if sends_layers else 0
        return gathered_bytes((model.num_wide - outside) / shape.layers, outside, sent, model.compute)

    def recomputed(self, model: Model, activations: float) -> float:
        return layers.recomputed(model, activations)

    def optimized(self, model: Model) -> float:
        return model.num_trained / self.shards

    def overlapped(self, device: Device, model: Model, units: BatchUnits, *, updates: bool) -> float:
        """Gathers of the parameters and reductions of the gradients."""
        if self.lends:
            return 0.0
        speed, size = link(device, model, self.shards), model.num_wide
        gathers = units.num_micro * (2 if updates else 1) * model.compute * size
        if not updates:
            return gathers / speed
        reduced = units.num_micro * GRADIENT_BYTES * model.num_trained / speed
        replicas = model.ranks // self.shards
        if replicas > 1:  # the last micro-batch sums the shards of all replicas
            spans = device.network if model.machines > 1 else device.peer_link
            reduced += 2 * GRADIENT_BYTES * model.num_trained / self.shards / spans
        return gathers / speed + reduced

    def exchanged(self, device: Device, model: Model, units: BatchUnits, passes: float) -> float:
        """Ulysses: queries, keys, values and outputs change owners."""
        if units.sequence_parallel == 1:
            return 0.0
        shape, tokens = model.shape, units.per_rank.tokens / units.sequence_parallel
        entries = 2 * (shape.heads + shape.key_heads) * shape.head_dim * tokens * shape.layers
        return entries * model.compute * passes / link(device, model, units.sequence_parallel)
