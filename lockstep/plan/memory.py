"""Peak memory of one device in every phase of a step, by what it is used for.

What stays between phases (weights, moments) is counted for every model of the pool; gradients, activations, logits and the KV cache
only in the phase that has them. The formulas of each training engine are in `layouts/`; docs/plan.md compares them with
measured peaks.
"""

from dataclasses import dataclass
from typing import Literal

from lockstep.kernels.activation_memory import CACHE_SHARE_OF_FREE, STREAM_BYTES
from lockstep.plan.adapters import linear_parameters
from lockstep.plan.job import Job
from lockstep.plan.layouts import layers
from lockstep.plan.model import Model, Resident

Activity = Literal["generate", "forward", "update"]

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
    *("weights in 8 bits", "dequantised weight", "gradients between updates", "gradient buckets"),
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
            found.append(
                _phase(name, model, _between(job, model, "forward"), model.layout.forward(job.device, model, units))
            )
        if model.update is not None:
            name = UPDATES.get(model.role, "update actor")
            others = _between(job, model, "update")
            own = model.layout.update(job.device, model, model.update, sum(others.values()))
            found.append(_phase(name, model, others, own))
    return sorted(found, key=lambda phase: ORDER.index(phase.name))


def cached_tokens(job: Job, memory: list[Phase]) -> int:
    """Tokens that the KV cache of a rollout engine holds."""
    phase = next(phase for phase in memory if phase.name == "generate")
    model = job.model(phase.role)
    return int(phase.parts.get("KV cache", 0.0) / job.kv_bytes(model))


def missing_cache(job: Job, memory: list[Phase]) -> float:
    """Bytes by which the KV cache is too small for one sequence: vLLM's is what its share leaves beside the weights."""
    phase = next((phase for phase in memory if phase.name == "generate"), None)
    if phase is None:
        return 0.0
    model = job.model(phase.role)
    sequence = job.lengths.total * job.kv_bytes(model)
    return max(0.0, sequence - phase.parts.get("KV cache", 0.0))


def _phase(name: str, model: Model, others: dict[str, float], own: dict[str, float]) -> Phase:
    return Phase(name, model.role, model.pool, {part: size for part, size in (others | own).items() if size})


def _between(job: Job, active: Model, activity: Activity) -> dict[str, float]:
    """What the models of the pool have on the device while `active` computes."""
    parts = dict.fromkeys(("weights", "moments", "weights of other models", "gradients between updates"), 0.0)
    for model in (model for model in job.models if model.pool == active.pool):
        is_active, decodes = model is active, model is active and activity == "generate"
        computes = is_active and not (decodes and _has_own_copy(job, model))
        own = _resident(model, is_active=computes, updates=is_active and activity == "update")
        parts["weights" if is_active else "weights of other models"] += own.weights
        parts["moments"] += own.moments
        parts["gradients between updates"] += own.gradients
        if model.decodes and _has_weights_for_decoding(job, model, decodes=decodes):
            parts["weights for decoding"] = _copy_for_decoding(job, model)
        if model.decodes and job.rollout.quantizes:
            parts["weights in 8 bits"] = linear_parameters(model.shape)
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
    has_copy = not model.layout.lends or (job.rollout.tensor_parallel > 1 and model.update is not None)
    return has_copy and not released


def _resident(model: Model, *, is_active: bool, updates: bool) -> Resident:
    if (
        model.update is None and model.decodes and model.ranks > 1
    ):  # a rollout in its own pool has weights for decoding alone
        return Resident(0.0, 0.0)
    return model.layout.resident(model, is_active=is_active, updates=updates)


def _states(job: Job, model: Model, room: float) -> float:
    """Slots of the sequences that decode together, and one for rows of none; at most half of the room for states and KV cache."""
    slot = model.shape.state_bytes(model.compute, job.rollout.tensor_parallel)
    if not slot:
        return 0.0
    return min((job.rollout.concurrent + 1) * slot, max(2, room / 2 // slot) * slot)


def _generation(job: Job, model: Model, others: float) -> dict[str, float]:
    """others: bytes on the device besides what this adds. The KV cache takes what is left of its share and of the device."""
    shape, rollout = model.shape, job.rollout
    one_layer = (2 * shape.active_experts * shape.inner + 4 * shape.width) * model.compute + shape.width * STREAM_BYTES
    ranks, one_token = rollout.tensor_parallel, job.kv_bytes(model)
    weights: float = model.compute * shape.parameters
    if rollout.engine.takes_adapters:
        weights = model.compute * model.num_wide + model.four_bit_bytes
    weights += linear_parameters(shape) if rollout.quantizes else 0
    share = rollout.utilization * job.device.memory - weights / ranks
    room, wanted = min(share, CACHE_SHARE_OF_FREE * (job.device.memory - others)), rollout.cache_tokens * one_token
    states = _states(job, model, room)
    cache = min(wanted, max(room - states, job.lengths.total * one_token))
    if rollout.engine.fills_memory and not job.device.is_cpu:
        cache = max(0.0, share - states)
    return {
        "KV cache": cache,
        "states": states,
        "activations": max(rollout.prefill_tokens, rollout.step_rows) * one_layer,
        "logits": 2 * rollout.step_rows * shape.vocabulary * 4,
        "dequantised weight": layers.dequantised(model) if rollout.engine.takes_adapters else 0.0,
    }
