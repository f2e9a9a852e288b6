"""Peak memory of one device in every phase of a step, by what it is used for.

What stays between phases (weights, moments) is counted for every model of the pool; gradients, activations, logits and the KV cache
only in the phase that has them. The formulas follow the engines: docs/plan.md compares them with measured peaks.
"""

from dataclasses import dataclass
from typing import Literal

from lockstep.kernels.activation_memory import (
    CACHE_SHARE_OF_FREE,
    GRADIENT_BYTES,
    HEAD_CHUNK,
    HEAD_KEEPS,
    STREAM_BYTES,
    gathered_bytes,
    kept_layers,
)
from lockstep.plan.batch_units import BatchUnits
from lockstep.plan.hardware import Device
from lockstep.plan.job import Job, Model

Activity = Literal["generate", "forward", "update"]

MOMENT_BUCKET = 2**28
"""Offloaded moments stream through three buckets of both."""
CPU_HEAD_CHUNK = 1 << 26
RESERVED = 2.5e9
"""CUDA context, communication buffers and fragmentation."""


ORDER = (
    *("generate", "reward model", "old log-probs", "reference log-probs", "values"),
    *("update critic", "update actor", "update"),
)
"""The phases of a step."""
UPDATES = {"critic": "update critic", "model": "update"}
"""Role -> the phase that trains it, if it is not an actor."""
FIXED = (
    *("weights", "moments", "weights of other models", "weights for decoding", "gradients", "gathered layers"),
    "dequantised weight",
)
"""Parts that do not depend on the lengths of prompts and responses."""


@dataclass(frozen=True)
class Phase:
    """role: that computes. parts: what it is used for -> bytes."""

    name: str
    role: str
    pool: str
    parts: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    @property
    def fixed(self) -> float:
        """What it needs however short prompts and responses are."""
        return sum(size for part, size in self.parts.items() if part in FIXED)


def phases(job: Job) -> list[Phase]:
    """In the order of a step."""
    found = []
    for model in job.models:
        if model.decodes:
            others = _between(job, model, "generate")
            found.append(_phase("generate", model, others, _generation(job, model, sum(others.values()))))
        for name, units in model.passes.items():
            found.append(_phase(name, model, _between(job, model, "forward"), _forward(job.device, model, units)))
        if model.update is not None:
            name = UPDATES.get(model.role, "update actor")
            others = _between(job, model, "update")
            found.append(_phase(name, model, others, _update(job.device, model, model.update, sum(others.values()))))
    return sorted(found, key=lambda phase: ORDER.index(phase.name))


def cached_tokens(job: Job, memory: list[Phase]) -> int:
    """Tokens that the KV cache of a rollout engine holds."""
    phase = next(phase for phase in memory if phase.name == "generate")
    model = job.model(phase.role)
    return int(phase.parts.get("KV cache", 0.0) * job.rollout.tensor_parallel / model.shape.kv_bytes(model.compute))


def missing_cache(job: Job, memory: list[Phase]) -> float:
    """Bytes by which the KV cache is too small for one sequence: vLLM's is what its share leaves beside the weights."""
    phase = next((phase for phase in memory if phase.name == "generate"), None)
    if phase is None:
        return 0.0
    model = job.model(phase.role)
    sequence = job.lengths.total * model.shape.kv_bytes(model.compute) / job.rollout.tensor_parallel
    return max(0.0, sequence - phase.parts.get("KV cache", 0.0))


def _phase(name: str, model: Model, others: dict[str, float], own: dict[str, float]) -> Phase:
    return Phase(name, model.role, model.pool, {part: size for part, size in (others | own).items() if size})


def _between(job: Job, active: Model, activity: Activity) -> dict[str, float]:
    """What the models of the pool have on the device while `active` computes."""
    parts: dict[str, float] = {"weights": 0.0, "moments": 0.0, "weights of other models": 0.0}
    for model in (model for model in job.models if model.pool == active.pool):
        is_active, decodes = model is active, model is active and activity == "generate"
        computes = is_active and not (decodes and _has_own_copy(job, model))
        weights, moments = _resident(model, is_active=computes, updates=is_active and activity == "update")
        parts["weights" if is_active else "weights of other models"] += weights
        parts["moments"] += moments
        if model.decodes and _has_weights_for_decoding(job, model, decodes=decodes):
            parts["weights for decoding"] = _copy_for_decoding(job, model)
    return parts


def _copy_for_decoding(job: Job, model: Model) -> float:
    """Bytes. An engine that takes adapters shares weights in 4 bits, unless it is alone in its pool; others get merged weights."""
    ranks = job.rollout.tensor_parallel
    if not job.rollout.engine.takes_adapters:
        return model.compute * model.shape.parameters / ranks
    own = model.four_bit_bytes if model.update is None else 0.0
    return (own + model.compute * (model.num_wide + model.num_adapters)) / ranks


def _has_own_copy(job: Job, model: Model) -> bool:
    """Whether the rollout decodes with another copy of a model that is trained in the same pool."""
    return not job.rollout.engine.shares_weights and model.update is not None


def _has_weights_for_decoding(job: Job, model: Model, *, decodes: bool) -> bool:
    """Whether the device has weights besides those of `_resident`. decodes: now."""
    if _has_own_copy(job, model):
        return decodes or not job.rollout.sleeps
    released = model.engine.param_offload and model.update is not None and not decodes
    return model.is_sharded and not released


def _resident(model: Model, *, is_active: bool, updates: bool) -> tuple[float, float]:
    """Bytes of weights and of moments."""
    engine, shards = model.engine, model.shards
    if engine.offload_policy:
        return 0.0, 0.0
    on_device = is_active or not engine.param_offload
    whole = model.update is None and model.decodes and model.ranks > 1  # a rollout in its own pool is not sharded
    frozen = 0.0
    if not whole and model.num_frozen:
        frozen = on_device * (model.compute * model.num_wide / shards + model.four_bit_bytes)
    copied = not model.is_sharded and model.master != model.compute
    masters_are_there = not engine.param_offload or (is_active and (updates or not copied))
    trained = masters_are_there * model.master * model.num_trained / shards
    trained += on_device * copied * model.compute * model.num_trained
    return frozen + trained, 0.0 if engine.optimizer_offload else 2 * model.master * model.num_trained / shards


def _generation(job: Job, model: Model, others: float) -> dict[str, float]:
    """others: bytes on the device besides what this adds. The KV cache takes what is left of its share and of the device."""
    shape, rollout = model.shape, job.rollout
    one_layer = (2 * shape.active_experts * shape.inner + 4 * shape.width) * model.compute + shape.width * STREAM_BYTES
    ranks, one_token = rollout.tensor_parallel, shape.kv_bytes(model.compute) / rollout.tensor_parallel
    weights: float = model.compute * shape.parameters
    if rollout.engine.takes_adapters:
        weights = model.compute * model.num_wide + model.four_bit_bytes
    share = rollout.utilization * job.device.memory - weights / ranks
    room, wanted = min(share, CACHE_SHARE_OF_FREE * (job.device.memory - others)), rollout.cache_tokens * one_token
    cache = min(wanted, max(room, job.lengths.total * one_token))
    if rollout.engine.fills_memory and not job.device.is_cpu:
        cache = max(0.0, share)
    return {
        "KV cache": cache,
        "activations": max(rollout.prefill_tokens, rollout.concurrent) * one_layer,
        "logits": 2 * rollout.concurrent * shape.vocabulary * 4,
        "dequantised weight": _dequantised(model) if rollout.engine.takes_adapters else 0.0,
    }


def _forward(device: Device, model: Model, units: BatchUnits) -> dict[str, float]:
    tokens = units.tokens_per_device
    return {
        "gathered layers": _gathered(model),
        "activations": model.layer_bytes(tokens),
        "logits": _logits(device, model, units, free=0.0),
        "dequantised weight": _dequantised(model),
    }


def _update(device: Device, model: Model, units: BatchUnits, others: float) -> dict[str, float]:
    """others: bytes on the device besides what this adds."""
    shape, engine, tokens = model.shape, model.engine, units.tokens_per_device
    gradients = 0.0 if engine.offload_policy else GRADIENT_BYTES * model.num_trained / model.shards
    layer, stream = model.layer_bytes(tokens), tokens * shape.width * STREAM_BYTES
    gathered = _gathered(model, updates=True)
    kept = shape.layers
    if model.checkpointing:
        saves_memory = engine.param_offload or engine.optimizer_offload or engine.offload_policy or device.is_cpu
        saves_memory = saves_memory or model.four_bit is not None
        free = device.memory - others - gradients
        kept = 0 if saves_memory else kept_layers(device.memory, free, shape.layers, layer, stream, gathered)
    again = layer if kept < shape.layers else 0
    activations = kept * layer + (shape.layers - kept) * stream + again
    parts = {"gradients": gradients, "gathered layers": gathered, "activations": activations}
    parts["dequantised weight"] = _dequantised(model)
    free = device.memory - others - sum(parts.values())
    parts["logits"] = _logits(device, model, units, free)
    if engine.optimizer_offload and not engine.offload_policy and not device.is_cpu:
        parts["moment buckets"] = 2 * min(3 * MOMENT_BUCKET, model.master * model.num_trained / model.shards)
    return parts


def _gathered(model: Model, *, updates: bool = False) -> float:
    if model.shards == 1 and not model.engine.offload_policy:
        return 0.0
    shape = model.shape
    outside = shape.parameters - shape.layers * shape.layer_parameters
    sends_layers = updates and model.adapters is None
    sent = max(shape.layer_parameters, outside) if sends_layers else 0
    return gathered_bytes((model.num_wide - outside) / shape.layers, outside, sent, model.compute)


def _dequantised(model: Model) -> float:
    """The largest weight in 4 bits, in the compute dtype while its layer computes."""
    return 0.0 if model.four_bit is None else model.compute * model.four_bit.largest


def _logits(device: Device, model: Model, units: BatchUnits, free: float) -> float:
    """free: bytes on the device, of which the head's forward may keep a share for its backward."""
    if model.is_scalar:
        return units.tokens_per_device * model.shape.width * 4  # hidden states in float32
    entries = units.targets_per_device * model.shape.vocabulary
    if device.is_cpu:
        return 3 * 4 * min(entries, CPU_HEAD_CHUNK)
    return 4 * min(entries, HEAD_CHUNK) + min(2 * entries, HEAD_KEEPS * max(0.0, free))
