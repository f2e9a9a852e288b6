"""Time of a step from the roofline: matrix products, attention's softmax, traffic of weights, KV cache, activations and logits,
and transfers.

The constants are fitted to the measured steps of docs/plan.md; a phase is the sum of what cannot overlap.
"""

import math
from collections.abc import Sequence

from lockstep.plan.batch_units import BatchUnits
from lockstep.plan.hardware import Device
from lockstep.plan.job import Job
from lockstep.plan.memory import Phase
from lockstep.plan.model import Model, link

HALF_EFFICIENT_WIDTH = 350
"""Matrix products of a model this wide reach half of the device's rate, wider ones more: w / (w + this)."""
BEST_EFFICIENCY = 0.92
ACTIVATION_PASSES = 5
"""Times that a training step reads or writes each activation outside of matrix products."""
LOGIT_BYTES, LOGIT_GRADIENT_BYTES = 4, 6
"""Per logit outside of matrix products: the statistics read it in float32; for the backward pass they write it in half precision,
which is read and becomes the gradient."""
OPTIMIZER_PASSES = 4
"""Times that AdamW reads or writes masters, moments and gradients, taken together."""
ALL_REDUCE_S = 20e-6
"""Of a decode step's activations among tensor-parallel ranks, of which a layer has two."""

ADAPTERS_DECODE_S = 45e-6
"""Of the small products of a layer's adapters in a decode step."""

DEQUANTISING_RATE = 0.32
"""Share of the device's bandwidth at which bitsandbytes dequantises weights in 4 bits."""


def step_times(job: Job, memory: list[Phase]) -> dict[str, float]:
    """Phase -> seconds, in the order of `memory`."""
    times = {}
    for phase in memory:
        model = job.model(phase.role)
        if phase.name == "generate":
            times[phase.name] = _generation(job, phase)
        elif phase.name in model.passes:
            times[phase.name] = _pass(job, model, model.passes[phase.name], recomputed=None)
        else:
            times[phase.name] = model.updates * _update(job, model, phase)
    return times


def transfer_time(device: Device, models: Sequence[Model]) -> float:
    """Seconds to send the actor's trained weights to a rollout in another pool: a broadcast by one rank. 0 if servers generate."""
    actor, rollout = (next((model for model in models if model.role == role), None) for role in ("actor", "rollout"))
    if actor is None or rollout is None:
        return 0.0
    between = device.peer_link if rollout.machines == actor.machines == 1 else device.network
    return actor.compute * actor.num_trained * (1 / between + 1 / link(device, actor, actor.layout.shards))


def fitting_sequences(job: Job, phase: Phase) -> int:
    """Sequences of average length that the KV cache and the states of `phase` hold, of those that may decode together."""
    model, rollout = job.model(phase.role), job.rollout
    cached = phase.parts.get("KV cache", 0.0) / job.kv_bytes(model)
    found = min(rollout.concurrent, max(1, cached // (job.lengths.prompt + job.lengths.response / 2)))
    if slot := model.shape.state_bytes(model.compute, rollout.tensor_parallel):
        found = min(found, phase.parts["states"] // slot - 1)
    return int(found)


def _generation(job: Job, phase: Phase) -> float:
    """Waves of sequences that decode together. Each step reads the weights once and the KV cache of its sequences; it reads and
    writes their states."""
    device, rollout, model = job.device, job.rollout, job.model(phase.role)
    shape, lengths, ranks = model.shape, job.lengths, rollout.tensor_parallel
    concurrent = fitting_sequences(job, phase)
    waves = rollout.sequences / concurrent
    context = lengths.prompt + lengths.response / 2
    weights = model.compute * (shape.layers * _touched_layer(model, concurrent) + shape.head_parameters)
    weights += _dequantising(model) if rollout.engine.takes_adapters else 0.0
    cache = concurrent * (context * job.kv_bytes(model) + 2 * shape.state_bytes(model.compute, ranks))
    products = 2 * concurrent * (shape.layers * shape.active_layer_parameters + shape.head_parameters)
    step = max((weights / ranks + cache) / device.bandwidth, products / ranks / _rate(device, shape.width))
    step += shape.layers * (device.layer_overhead_s + (2 * ALL_REDUCE_S if ranks > 1 else 0.0))
    has_adapters = model.adapters is not None and rollout.engine.takes_adapters
    step += shape.layers * ADAPTERS_DECODE_S if has_adapters else 0.0
    prompts = math.ceil(rollout.sequences / job.samples) * lengths.prompt
    prefill = 2 * prompts * shape.layers * shape.active_layer_parameters / _rate(device, shape.width) / ranks
    gather = 0.0
    if model.update is not None and (ranks > 1 or not model.layout.lends):
        # offload frees the rollout's copy; merged weights are sent as a whole
        sends_all = model.engine.param_offload or not rollout.engine.takes_adapters
        changed = shape.parameters if sends_all else model.num_trained
        gather = model.compute * changed / link(device, model, model.layout.shards)
    return gather + prefill + waves * lengths.response * step


def _dequantising(model: Model) -> float:
    """Dequantising all weights in 4 bits once, which reads them and writes the compute dtype, as bytes at full bandwidth."""
    if model.four_bit is None:
        return 0.0
    return (model.four_bit.bytes + model.compute * model.four_bit.parameters) / DEQUANTISING_RATE


def _touched_layer(model: Model, num_tokens: float) -> float:
    """Parameters of a layer that a decode step of `num_tokens` tokens reads: with experts, those that any token chose."""
    shape = model.shape
    chosen = shape.experts * (1 - (1 - shape.active_experts / shape.experts) ** num_tokens)
    return shape.mixer_parameters + shape.used_mlp_parameters(chosen)


def _update(job: Job, model: Model, phase: Phase) -> float:
    """One optimizer step."""
    assert model.update is not None
    device = job.device
    recomputed = model.layout.recomputed(model, phase.parts["activations"])
    share = model.layout.optimized(model)
    optimizer = OPTIMIZER_PASSES * (3 * model.master + 4) / 2 * share / device.bandwidth
    if model.engine.optimizer_offload and not device.is_cpu:
        optimizer += 2 * model.master * share / device.host_link
    return _pass(job, model, model.update, recomputed) + optimizer


def _pass(job: Job, model: Model, units: BatchUnits, recomputed: float | None) -> float:
    """recomputed: share of the layers that the backward pass computes again; None without a backward pass."""
    device, shape, lengths, layout = job.device, model.shape, job.lengths, model.layout
    tokens, targets = (n / units.sequence_parallel for n in (units.per_rank.tokens, units.per_rank.targets))
    # forwards' worth of work: attention's backward takes two, that of a linear layer one for its input and one for its weight
    passes = 1.0 if recomputed is None else 3 + recomputed
    products = passes if recomputed is None or model.adapters is None else passes - 1
    layers = tokens * shape.layers * 2 * shape.active_layer_parameters * products
    scores = tokens * shape.counts.attention * shape.heads * lengths.total / 2 * passes
    attention = max(scores / device.scores, 4 * shape.head_dim * scores / _rate(device, shape.width))
    head = 0 if model.is_scalar else 2 * targets * shape.head_parameters * min(products, 3)
    adapters = 2 * tokens * model.num_adapters * passes
    traffic = tokens * shape.layers * model.layer_bytes(1) * ACTIVATION_PASSES * passes / 3
    if model.adapters is not None:
        traffic += tokens * shape.layers * model.adapters.moved_entries * model.compute * passes
    traffic += units.num_micro * passes * _dequantising(model)
    if not model.is_scalar:
        per_logit = LOGIT_BYTES + (0 if recomputed is None else LOGIT_GRADIENT_BYTES)
        traffic += targets * shape.vocabulary * per_logit
    compute = attention + (layers + head + adapters) / _rate(device, shape.width) + traffic / device.bandwidth
    compute = compute / layout.product_ranks + layout.exchanged(device, model, units, passes)
    return max(layout.bubble(units) * compute, layout.overlapped(device, model, units, updates=recomputed is not None))


def _rate(device: Device, width: int) -> float:
    if device.is_cpu:
        return device.flops
    return device.flops * BEST_EFFICIENCY * width / (width + HALF_EFFICIENT_WIDTH)
