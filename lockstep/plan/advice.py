"""What a plan tells the user: whether it fits, and which settings make it fit. Each of them is planned before it is named."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lockstep.config.micro_batches import RL, SUPERVISED
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import sections_of
from lockstep.config.schema import as_arguments, flat_values, with_values
from lockstep.plan.estimate import GB, Plan, plan_of, show_lengths, show_seconds
from lockstep.plan.layouts import DeepSpeedLayout, FsdpLayout, MegatronLayout
from lockstep.plan.memory import RESERVED, Phase, cached_tokens

Settings = dict[str, Any]
"""Dotted key -> value."""

MOST_ALTERNATIVES = 3
LOWERS = 0.95
"""Settings that lower a phase leave at most this share of it."""
MOST_MACHINES = 64
LORA_RANK = 32

_ROLLOUT = "actor_rollout_ref.rollout"
_GPUS, _MACHINES = "trainer.n_gpus_per_node", "trainer.nnodes"


def summary(plan: Plan) -> str:
    """One line: whether it fits, and the time of a step or what to change."""
    device, worst = plan.job.device, plan.worst
    peak = f"{worst.peak / GB:.1f} of {device.memory / GB:.1f} GB in {worst.name}"
    if plan.fits:
        tokens = f"{show_lengths(plan.typical)} tokens"
        seconds = (
            f"; about {show_seconds(plan.step_s)} s per step with {tokens} per sequence" if device.is_timed else ""
        )
        return f"fits on {device.name}: at most {peak}{seconds}{_small_cache(plan)}"
    if plan.missing_cache:
        share = f"{_ROLLOUT}.gpu_memory_utilization={plan.job.rollout.utilization:g}"
        return f"does not fit on {device.name}: {share} has no room for the KV cache of one sequence. {advice(plan)}"
    part, size = max(worst.parts.items(), key=lambda item: item[1])
    return f"does not fit on {device.name}: {peak}, of which {part} take {size / GB:.1f}. {advice(plan)}"


def _cached_sequences(plan: Plan) -> float:
    """Sequences of full length that the KV cache of a rollout engine holds."""
    if not any(phase.name == "generate" for phase in plan.phases):
        return math.inf
    return cached_tokens(plan.job, plan.phases) // plan.job.lengths.total


def _small_cache(plan: Plan) -> str:
    """A warning if sequences decode one after another, with the settings that let most of them decode together."""
    if _cached_sequences(plan) >= min(2, plan.job.rollout.concurrent):
        return ""
    candidates = [{f"{_ROLLOUT}.gpu_memory_utilization": share} for share in (0.7, 0.85)]
    found = {1.0: ""}
    for settings in (*candidates, *_same_results(plan, [])):
        changed = _planned(plan, settings)
        if changed is not None and changed.fits:
            found.setdefault(_cached_sequences(changed), f". Try {' '.join(as_arguments(settings))}")
    return f". The KV cache holds a single sequence of full length, so generation is slow{found[max(found)]}"


def advice(plan: Plan) -> str:
    """A sentence with settings that make the plan fit: alternatives, or several together."""
    same_results = list(_same_results(plan))
    found = _alternatives(plan, same_results)
    for candidates in (same_results, [*same_results, *_rounding(plan)]):
        together = {} if found else _together(plan, candidates)
        found = found or ([together] if _fits(plan, together) else [])
    found = found or [*_more_gpus(plan), *_adapters(plan)]
    if not found:
        return "No setting that was tried makes it fit; `lockstep plan --search` tries placements and parallel sizes together"
    return f"Try {', or '.join(' '.join(as_arguments(settings)) for settings in found[:MOST_ALTERNATIVES])}"


def lowering(plan: Plan, phase: Phase) -> str:
    """Settings that lower the memory of a phase, for a run that went out of memory there; empty if there are none."""
    found: dict[tuple[str, ...], Settings] = {}
    for settings in _same_results(plan, [phase]):
        changed = _planned(plan, settings)
        peaks = [] if changed is None else [other.peak for other in changed.phases if other.name == phase.name]
        if peaks and peaks[0] <= LOWERS * phase.peak:
            found.setdefault(tuple(settings), settings)
    return ", or ".join(" ".join(as_arguments(settings)) for settings in list(found.values())[:MOST_ALTERNATIVES])


def _planned(plan: Plan, settings: Settings) -> Plan | None:
    """None if the settings contradict each other."""
    try:
        return plan_of(with_values(plan.config, settings), plan.job.device, plan.typical, plan.machines)
    except (ArithmeticError, LookupError, ValueError):
        return None


def _needed(plan: Plan, settings: Settings) -> float:
    changed = _planned(plan, settings)
    return math.inf if changed is None else changed.needed


def _fits(plan: Plan, settings: Settings) -> bool:
    return _needed(plan, settings) <= plan.job.device.memory


def _alternatives(plan: Plan, candidates: Iterable[Settings]) -> list[Settings]:
    """Candidates that are enough by themselves, the first of each set of keys."""
    found: dict[tuple[str, ...], Settings] = {}
    for settings in candidates:
        if tuple(settings) not in found and _fits(plan, settings):
            found[tuple(settings)] = settings
    return list(found.values())


def _together(plan: Plan, candidates: Sequence[Settings]) -> Settings:
    """Candidates that make it fit together, or else need the least memory; without those that do not help."""
    chosen: list[Settings] = []
    needed = plan.needed
    while needed > plan.job.device.memory:
        best = min(candidates, key=lambda settings: _needed(plan, _merged([*chosen, settings])), default={})
        if (lower := _needed(plan, _merged([*chosen, best]))) >= needed:
            break
        chosen, needed = [*chosen, best], lower
    for settings in list(chosen):
        rest = [other for other in chosen if other is not settings]
        if _needed(plan, _merged(rest)) <= max(needed, plan.job.device.memory):
            chosen = rest
    return _merged(chosen)


def _merged(parts: Iterable[Settings]) -> Settings:
    return {key: value for settings in parts for key, value in settings.items()}


def _same_results(plan: Plan, phases: Sequence[Phase] | None = None) -> Iterator[Settings]:
    """Settings that do not change results, the cheapest first. phases: those to lower; None is all that do not fit."""
    if phases is None:
        phases = [phase for phase in plan.phases if phase.peak + RESERVED > plan.job.device.memory]
    values, is_rl = flat_values(plan.config), isinstance(plan.config, PPOConfig)
    for part in (2, 4, 8, 16, 32, math.inf):
        if smaller := _merged(_smaller_micro_batches(plan, phase, values, part) for phase in phases):
            yield smaller
    in_order = dict.fromkeys([*(phase.role for phase in phases), *(model.role for model in plan.job.models)])
    roles = list({sections_of(role): role for role in reversed(in_order)}.values())[::-1]
    for role in roles:
        yield {f"{sections_of(role).model}.enable_gradient_checkpointing": True}
    for role in roles:
        yield from _offload(plan, role)
    if plan.missing_cache:
        yield from ({f"{_ROLLOUT}.gpu_memory_utilization": share} for share in (0.7, 0.85))
    elif is_rl and any(phase.name == "generate" for phase in phases):
        share = values[f"{_ROLLOUT}.gpu_memory_utilization"]
        yield from ({f"{_ROLLOUT}.gpu_memory_utilization": lower} for lower in (0.4, 0.3, 0.2) if lower < share)
        most = values[f"{_ROLLOUT}.max_num_seqs"]
        yield from ({f"{_ROLLOUT}.max_num_seqs": most // part} for part in (2, 4, 8) if most // part)
    for role in roles:
        yield from _parallel_sizes(plan, role)
    if is_rl:
        yield from _tensor_parallel(plan, values)
        yield from ({"trainer.placement": name} for name in ("hybrid", "split"))


def _engine(plan: Plan, role: str) -> str:
    """The section of its training engine."""
    return sections_of(role).engine(flat_values(plan.config))


def _offload(plan: Plan, role: str) -> Iterator[Settings]:
    key, layout = _engine(plan, role), plan.job.model(role).layout
    yield {f"{key}.optimizer_offload": True}
    if isinstance(plan.config, PPOConfig) or not isinstance(layout, FsdpLayout):
        yield {f"{key}.param_offload": True}
    else:
        yield {f"{key}.offload_policy": True}
    if isinstance(layout, MegatronLayout):
        yield {f"{key}.param_offload": True, f"{key}.optimizer_offload": True, f"{key}.grad_offload": True}


def _parallel_sizes(plan: Plan, role: str) -> Iterator[Settings]:
    """More ranks that share a sequence or a model."""
    key, layout = _engine(plan, role), plan.job.model(role).layout
    ranks = max(model.ranks for model in plan.job.models)
    sizes = [size for size in (2, 4, 8) if size <= ranks]
    if isinstance(layout, FsdpLayout):
        yield from ({f"{sections_of(role).role}.ulysses_sequence_parallel_size": size} for size in sizes)
    elif isinstance(layout, DeepSpeedLayout):
        yield from ({f"{key}.zero_stage": stage} for stage in (2, 3) if stage > layout.config.zero_stage)
    elif isinstance(layout, MegatronLayout):
        yield from ({f"{key}.tensor_model_parallel_size": size} for size in sizes if size > layout.tp)
        yield from ({f"{key}.pipeline_model_parallel_size": size} for size in sizes if size > layout.pp)


def _smaller_micro_batches(plan: Plan, phase: Phase, values: Settings, part: float) -> Settings:
    """One `part`th of the phase's tokens or sequences, at least one sequence (a pair); empty if it has no fewer."""
    keys, model = (RL | SUPERVISED).get(phase.name), plan.job.model(phase.role)
    units = model.passes.get(phase.name, model.update)
    if keys is None or units is None:
        return {}
    together = 1 if isinstance(plan.config, PPOConfig) else plan.job.samples
    if units.by_tokens:
        least = math.ceil(together * plan.job.lengths.total / units.sequence_parallel)
        size, now = max(least, int(values[keys.tokens] // part)), values[keys.tokens]
        return {keys.tokens: size} if size < now else {}
    size, now = max(1, int(units.micro.rows // together // part)), units.micro.rows // together
    return {keys.rows: size} if size < now else {}


def _tensor_parallel(plan: Plan, values: Settings) -> Iterator[Settings]:
    """More ranks for a rollout engine that divides the weights that decode."""
    heads, info = plan.job.models[0].shape.heads, plan.job.rollout.engine
    if not info.tensor_parallel and info.if_too_large is None:
        return
    engine = {} if info.tensor_parallel else {f"{_ROLLOUT}.name": info.if_too_large}
    for size in (2, 4, 8):
        if values[_GPUS] % size == 0 and heads % size == 0 and size > values[f"{_ROLLOUT}.tensor_model_parallel_size"]:
            yield engine | {f"{_ROLLOUT}.tensor_model_parallel_size": size}


def _rounding(plan: Plan) -> Iterator[Settings]:
    for model in plan.job.models:
        if model.update is not None and isinstance(model.layout, FsdpLayout):  # the others' masters are float32
            yield {f"{_engine(plan, model.role)}.model_dtype": "bfloat16"}


def _more_gpus(plan: Plan) -> list[Settings]:
    """The fewest GPUs that are enough, with other settings; those of torchrun are no setting."""
    if not isinstance(plan.config, PPOConfig) or plan.config.resource_pool_spec:
        return []
    gpus, machines = plan.config.trainer.n_gpus_per_node, plan.config.trainer.nnodes
    sizes = [{_GPUS: size} for size in (2, 4, 8) if size > gpus]
    whole = {_GPUS: 8} if gpus < 8 else {}
    sizes += [whole | {_MACHINES: machines * factor} for factor in (2, 4, 8) if machines * factor <= MOST_MACHINES]
    for size in sizes:
        changed = _planned(plan, size)
        if changed is None:
            continue
        own = {} if changed.fits else _together(changed, [*_same_results(changed), *_rounding(changed)])
        if _fits(changed, own):
            return [size | own]
    return []


def _adapters(plan: Plan) -> list[Settings]:
    """LoRA trains something else, so it is named only if nothing else is enough on these GPUs."""
    section = sections_of(plan.job.models[0].role).model
    lora = {f"{section}.lora_rank": LORA_RANK}
    for settings in (lora, lora | {f"{section}.load_in_4bit": True}):
        changed = _planned(plan, settings)
        if changed is None:
            continue
        own = {} if changed.fits else _together(changed, list(_same_results(changed)))
        if _fits(changed, own):
            return [settings | own]
    return []
