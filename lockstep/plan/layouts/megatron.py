"""Megatron: a stage of consecutive layers on each pipeline rank, whose matrices the tensor-parallel ranks split.

per rank    layers / pp, attention and MLP / tp, experts / (ep * expert tp), embeddings / tp on the first and the last stage
gradients   float32 for all weights of the rank, always there unless `grad_offload`
optimizer   masters and moments, sharded over the data-parallel ranks by the distributed optimizer
activations of up to pp micro-batches on the first stage: each waits for its backward pass
"""

import math

from lockstep.config.megatron import McoreEngineConfig
from lockstep.kernels.activation_memory import GRADIENT_BYTES, STREAM_BYTES
from lockstep.plan.batch_units import BatchUnits
from lockstep.plan.hardware import Device
from lockstep.plan.layouts import layers
from lockstep.plan.model import Model, Parts, Resident, TrainLayout, link
from lockstep.plan.model_shape import ModelShape

MASTER_BYTES = 4
"""Of each master weight and moment; weights that compute in float32 are their own masters."""


class MegatronLayout(TrainLayout):
    """tp, pp, cp, ep, expert_tp: sizes of the parallel groups."""

    lends = False

    def __init__(self, config: McoreEngineConfig, ranks: int, shape: ModelShape) -> None:
        self.config = config
        self.tp, self.pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        self.cp, self.ep = config.context_parallel_size, config.expert_model_parallel_size
        self.expert_tp = (config.expert_tensor_parallel_size or self.tp) if shape.experts > 1 else 1
        self.row_ranks = config.ranks_per_row
        self.shards = self.tp * self.pp
        self.dp = _quotient(ranks, self.tp * self.pp, "ranks")
        self.expert_dp = _quotient(ranks, self.pp * self.ep * self.expert_tp, "ranks") if shape.experts > 1 else self.dp
        self.layers = _quotient(shape.layers, self.pp, "layers")
        for size, name in ((shape.heads, "attention heads"), (shape.key_heads, "key-value heads")):
            _quotient(size, self.tp, name)
        _quotient(shape.routed_experts, self.ep, "experts")

    def parameters(self, model: Model) -> tuple[float, float]:
        """Of a rank: those that all data-parallel ranks have, and experts."""
        shape = model.shape
        replicated = shape.norm_parameters + shape.router_parameters
        dense = shape.layer_parameters - shape.routed_parameters - replicated
        own = self.layers * (dense / self.tp + replicated)
        experts = self.layers * shape.routed_parameters / (self.ep * self.expert_tp)
        ends = shape.head_parameters * (2 if self.pp == 1 and not shape.tied else 1) / self.tp
        if model.is_scalar:  # a head of one number instead of the vocabulary
            ends = shape.head_parameters / self.tp
        return own + ends + shape.width, experts

    def resident(self, model: Model, *, is_active: bool, updates: bool) -> Resident:
        engine = self.config
        size = sum(self.parameters(model))
        on_device = is_active or not engine.param_offload
        weights = on_device * model.compute * size
        if not model.num_trained:
            return Resident(weights, 0.0)
        has_masters = model.compute != MASTER_BYTES and (updates or not engine.param_offload)
        masters = has_masters * MASTER_BYTES * self.optimized(model)
        moments = 0.0 if engine.optimizer_offload else self._moments(model)
        gradients = 0.0 if updates or engine.grad_offload else self._gradients(model)
        return Resident(weights + masters, moments, gradients)

    def _moments(self, model: Model) -> float:
        return 2 * MASTER_BYTES * self.optimized(model)

    def _gradients(self, model: Model) -> float:
        in_float32 = self.config.override_ddp_config.get("grad_reduce_in_fp32", True)
        return (GRADIENT_BYTES if in_float32 else model.compute) * sum(self.parameters(model))

    def optimized(self, model: Model) -> float:
        if not model.num_trained:
            return 0.0
        own, experts = self.parameters(model)
        if not self.config.use_distributed_optimizer:
            return own + experts
        return own / self.dp + experts / self.expert_dp

    def forward(self, device: Device, model: Model, units: BatchUnits) -> Parts:
        return {
            "activations": self._layer_bytes(model, units.tokens_per_device),
            "logits": layers.logits(device, model, units, free=0.0, ranks=self.tp),
        }

    def update(self, device: Device, model: Model, units: BatchUnits, others: float) -> Parts:
        """On the stage that needs more: the first has micro-batches in flight, the last the logits."""
        gradients = self._gradients(model)
        in_flight = min(self.pp, units.num_micro)
        first = {"gradients": gradients, "activations": in_flight * self._kept(model, units)}
        last = {"gradients": gradients, "activations": self._kept(model, units)}
        if self._recomputes(model):
            again = self._layer_bytes(model, units.tokens_per_device)
            first["activations"] += again
            last["activations"] += again
        free = device.memory - others - sum(last.values())
        last["logits"] = layers.logits(device, model, units, free, ranks=self.tp)
        stages = [last] if self.pp == 1 else [first, last]
        if self.config.optimizer_offload and not device.is_cpu:  # they come for the step, when activations are gone
            for parts in stages:
                parts["moments for the step"] = max(0.0, self._moments(model) - sum(parts.values()) + gradients)
        return max(stages, key=lambda parts: sum(parts.values()))

    def _kept(self, model: Model, units: BatchUnits) -> float:
        """What the layers of a stage keep of one micro-batch."""
        tokens = units.tokens_per_device
        if self._recomputes(model):
            return self.layers * tokens * model.shape.width * STREAM_BYTES / self._stream_ranks
        return self.layers * self._layer_bytes(model, tokens)

    def _layer_bytes(self, model: Model, tokens: int) -> float:
        """Of a layer without recomputation: stream and norm, twice; q, k, v before and after rotary; the attention output; gate, up
        and their product. Experts also keep the tokens that they were sent."""
        shape = model.shape
        stream = 2 * shape.width * (STREAM_BYTES + model.compute) / self._stream_ranks
        heads = (3 * shape.heads + 3 * shape.key_heads) * shape.head_dim / self.tp
        inner = 3 * shape.active_experts * shape.inner / self.expert_tp
        if shape.experts == 1:
            inner = 3 * shape.inner / self.tp
        else:
            inner += 2 * shape.active_experts * shape.width / self._stream_ranks
        return tokens * (stream + (heads + inner) * model.compute)

    def _recomputes(self, model: Model) -> bool:
        """All layers; `selective` recomputes attention scores alone, which the packed attention never keeps."""
        default = "full" if model.checkpointing else None
        return self.config.override_transformer_config.get("recompute_granularity", default) == "full"

    @property
    def _stream_ranks(self) -> int:
        return self.tp if self.config.sequence_parallel else 1

    def recomputed(self, model: Model, activations: float) -> float:
        return 1.0 if self._recomputes(model) else 0.0

    @property
    def product_ranks(self) -> int:
        return self.tp * self.pp

    def bubble(self, units: BatchUnits) -> float:
        return (units.num_micro + self.pp - 1) / units.num_micro

    def overlapped(self, device: Device, model: Model, units: BatchUnits, *, updates: bool) -> float:
        """Gradients are reduced once per optimizer step, and new weights gathered once."""
        if not updates or self.dp == 1:
            return 0.0
        own, experts = self.parameters(model)
        speed = link(device, model, self.tp * self.dp)
        replicated = own + (experts if self.expert_dp > 1 else 0.0)
        return replicated * (GRADIENT_BYTES + model.compute) / speed

    def exchanged(self, device: Device, model: Model, units: BatchUnits, passes: float) -> float:
        """The stream is gathered and scattered around attention and MLP; tokens go to their experts and to other stages."""
        shape, tokens = model.shape, units.per_rank.tokens / units.sequence_parallel
        seconds = 0.0
        if self.tp > 1:
            moved = 4 * (self.tp - 1) / self.tp * tokens * shape.width * model.compute * self.layers
            seconds += moved * passes / link(device, model, self.tp)
        if shape.experts > 1 and self.ep > 1:
            share = (self.ep - 1) / self.ep / self._stream_ranks
            moved = 2 * share * tokens * shape.active_experts * shape.width * model.compute * self.layers
            seconds += moved * passes / link(device, model, self.tp * self.ep)
        if self.pp > 1:
            apart = device.network if model.machines > 1 else device.peer_link
            seconds += 2 * tokens * shape.width * STREAM_BYTES / self._stream_ranks / apart
        return seconds


def _quotient(size: int, parts: int, name: str) -> int:
    if size % parts:
        raise ValueError(f"{size} {name} are not divisible by the parallel size {parts}")
    return math.ceil(size / parts)
