"""Time of a step from the roofline: matrix products, traffic of weights, KV cache and activations, and transfers.

The constants are fitted to the measured steps of docs/plan.md; a phase is the sum of what cannot overlap.
"""

import math

from lockstep.plan.batch_units import BatchUnits
from lockstep.plan.hardware import Device
from lockstep.plan.job import Job, Model
from lockstep.plan.memory import Phase

HALF_EFFICIENT_WIDTH = 350
"""Matrix products of a model this wide reach half of the device's rate, wider ones more: w / (w + this)."""
BEST_EFFICIENCY = 0.92
ACTIVATION_PASSES = 5
"""Times that a training step reads or writes each activation outside of matrix products."""
OPTIMIZER_PASSES = 4
"""Times that AdamW reads or writes masters, moments and gradients, taken together."""


def step_times(job: Job, memory: list[Phase]) -> dict[str, float]:
    """Phase -> seconds, in the order of `memory`."""
    times = {}
    for phase in memory:
        if phase.name == "generate":
            times[phase.name] = _generation(job, phase)
        elif phase.name.startswith("update"):
            model = job.model("critic") if phase.name == "update critic" else job.models[0]
            times[phase.name] = model.updates * _update(job, model, phase)
        else:
            role = {"reference log-probs": "ref", "values": "critic", "reward model": "rm"}.get(phase.name)
            model = job.model(role) if role else job.models[0]
            assert model.forward is not None
            times[phase.name] = _pass(job, model, model.forward, forwards=1)
    return times


def _generation(job: Job, phase: Phase) -> float:
    """Waves of sequences that decode together. Each step reads the weights once and the KV cache of its sequences."""
    device, rollout, model = job.device, job.rollout, next(model for model in job.models if model.decodes)
    shape, lengths = model.shape, job.lengths
    context = lengths.prompt + lengths.response / 2
    cached = phase.parts["KV cache"] / shape.kv_bytes(model.compute)
    concurrent = min(rollout.concurrent, max(1, cached // context))
    waves = rollout.sequences / concurrent
    weights = model.compute * (shape.layers * _touched_layer(model, concurrent) + shape.head_parameters)
    cache = concurrent * context * shape.kv_bytes(model.compute)
    products = 2 * concurrent * (shape.layers * shape.active_layer_parameters + shape.head_parameters)
    step = max((weights + cache) / device.bandwidth, products / _rate(device, shape.width))
    step += shape.layers * device.layer_overhead_s
    prompts = math.ceil(rollout.sequences / job.samples) * lengths.prompt
    prefill = 2 * prompts * shape.layers * shape.active_layer_parameters / _rate(device, shape.width)
    gather = model.compute * shape.parameters / device.peer_link if model.is_sharded else 0.0
    return gather + prefill + waves * lengths.response * step


def _touched_layer(model: Model, num_tokens: float) -> float:
    """Parameters of a layer that a decode step of `num_tokens` tokens reads: with experts, those that any token chose."""
    shape = model.shape
    chosen = shape.experts * (1 - (1 - shape.active_experts / shape.experts) ** num_tokens)
    return shape.attention_parameters + chosen * shape.mlp_parameters


def _update(job: Job, model: Model, phase: Phase) -> float:
    """One optimizer step."""
    assert model.update is not None
    device, shape = job.device, model.shape
    layer = shape.activation_bytes(model.update.tokens_per_device, model.compute)
    stream = model.update.tokens_per_device * shape.width * 4
    kept = shape.layers
    if phase.parts["activations"] < shape.layers * layer:
        kept = int((phase.parts["activations"] - layer - shape.layers * stream) // (layer - stream))
    recomputed = 1 - max(0, kept) / shape.layers
    share = shape.parameters / model.shards
    optimizer = OPTIMIZER_PASSES * (3 * model.master + 4) / 2 * share / device.bandwidth
    if model.engine.optimizer_offload and not device.is_cpu:
        optimizer += 2 * model.master * share / device.host_link
    return _pass(job, model, model.update, forwards=3 + recomputed) + optimizer


def _pass(job: Job, model: Model, units: BatchUnits, forwards: float) -> float:
    """forwards: 1 without gradients, 3 with them, more if layers are computed again."""
    device, shape, lengths = job.device, model.shape, job.lengths
    tokens, targets = (n / units.sequence_parallel for n in (units.per_rank.tokens, units.per_rank.targets))
    attention = 4 * shape.heads * shape.head_dim * lengths.total / 2
    layers = tokens * shape.layers * (2 * shape.active_layer_parameters + attention) * forwards
    head = 0 if model.role in ("critic", "rm") else 2 * targets * shape.head_parameters * min(forwards, 3)
    traffic = tokens * shape.layers * shape.activation_bytes(1, model.compute) * ACTIVATION_PASSES * forwards / 3
    compute = (layers + head) / _rate(device, shape.width) + traffic / device.bandwidth
    if not model.is_sharded:
        return compute
    gathers = units.num_micro * (1 if forwards == 1 else 2) * model.compute + (4 if forwards > 1 else 0)
    return max(compute, gathers * shape.parameters / device.peer_link)


def _rate(device: Device, width: int) -> float:
    if device.is_cpu:
        return device.flops
    return device.flops * BEST_EFFICIENCY * width / (width + HALF_EFFICIENT_WIDTH)
