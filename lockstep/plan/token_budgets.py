"""Tokens per micro-batch of the phases whose sizes are not set: as many as the device's memory has room for.

    each budget that is tried ─► plan ─► those that fit, phase by phase ─► the fastest

They depend only on the config, the models' shapes and the device's total memory, so a resumed run has the same. `lockstep plan`
and the training programs choose them here.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lockstep.config.micro_batches import RL, SUPERVISED, MicroBatchKeys
from lockstep.config.placement import need_reference_policy, needed_models, num_workers
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.roles import sections_of
from lockstep.config.schema import flat_values, with_values
from lockstep.config.sft import SupervisedConfig
from lockstep.config.train_engines import ranks_per_sequence
from lockstep.plan.estimate import longest_lengths, plan_of
from lockstep.plan.hardware import DEVICES, Device
from lockstep.plan.memory import RESERVED

C = TypeVar("C", bound=PPOConfig | SupervisedConfig)

BUDGETS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens that are tried."""
MOST_MEMORY = 0.97
"""Share of a GPU's memory that a phase with a chosen budget may need. An update whose layers keep as many activations as there is
room for (`kernels/activation_memory.py`) needs less: with more tokens they keep fewer, which is faster than few that keep all."""
MOST_HOST_MEMORY = 0.5
"""Share of the machine's memory for all processes, if they train on CPU."""
OVERHEAD = 700
"""A micro-batch takes as long as one of this many tokens more: LoRA's update with 4,096 and 8,192 tokens (docs/plan.md)."""
WITHOUT_A_PLAN = 8192
"""Tokens if the model's sizes are not known."""


def unset_keys(config: PPOConfig | SupervisedConfig) -> dict[str, MicroBatchKeys]:
    """Phase -> its keys, if they do not say how large micro-batches are."""
    values, keys = flat_values(config), RL if isinstance(config, PPOConfig) else SUPERVISED
    unset = config.unset_sizes
    return {phase: own for phase, own in keys.items() if values[own.switch] is None or own.tokens in unset}


def with_token_budgets(config: C, device: Device, machines: Sequence[int] = (1,)) -> C:
    """The config with every micro-batch set: explicit settings stay, the others are chosen for `device`.

    machines: processes on each, for a config that does not say so.
    """
    unset, values = unset_keys(config), flat_values(config)
    if not unset:
        return config
    by_rows = {keys.switch for keys in unset.values() if values[keys.switch] is None and values[keys.rows] is not None}
    chosen: dict[str, Any] = {keys.switch: keys.switch not in by_rows for keys in unset.values()}
    free = {phase: keys for phase, keys in unset.items() if values[keys.switch] or values[keys.rows] is None}
    tokens = _budgets(config, free, device, machines) if free else {}
    for phase, keys in free.items():
        if keys.switch in by_rows:  # the critic's update and values have one switch
            chosen[keys.rows] = max(1, tokens[phase] // longest_lengths(config).total)
        else:
            chosen[keys.tokens] = tokens[phase]
    found: C = with_values(config, chosen | {"unset_sizes": config.unset_sizes - chosen.keys()})
    return found


def describe_budgets(
    given: PPOConfig | SupervisedConfig, chosen: PPOConfig | SupervisedConfig, device: Device
) -> str | None:
    """The chosen budgets in one line, with the keys that set them; None if there are none."""
    roles = {"actor", "model"}
    if isinstance(given, PPOConfig):
        roles |= {*needed_models(given), *(["ref"] if need_reference_policy(given) else [])}
    values = flat_values(chosen)
    tokens = [keys.tokens for keys in unset_keys(given).values() if keys.role in roles and values[keys.switch]]
    if not tokens:
        return None
    memory = f"{device.memory / 1e9:.0f} GB ({'host' if device.is_cpu else device.name})"
    listed = ", ".join(f"{key}={values[key]}" for key in dict.fromkeys(tokens))
    return f"tokens per micro-batch chosen for {memory}: {listed}; set these keys to override"


def _budgets(
    config: PPOConfig | SupervisedConfig, unset: dict[str, MicroBatchKeys], device: Device, machines: Sequence[int]
) -> dict[str, int]:
    """Phase -> tokens per micro-batch on one device."""
    processes = num_workers(config) if isinstance(config, PPOConfig) else sum(machines)
    limit = MOST_HOST_MEMORY / processes * device.memory if device.is_cpu else MOST_MEMORY * device.memory - RESERVED
    # rates only decide between budgets that fit
    timed = device if device.is_timed else replace(DEVICES["A100-80G"], name=device.name, memory=device.memory)
    least = {phase: _least(config, keys) for phase, keys in unset.items()}
    best: dict[str, tuple[float, int]] = {}
    for number in BUDGETS:
        tokens = {phase: max(number, least[phase]) for phase in unset}
        settings: dict[str, Any] = {keys.switch: True for keys in unset.values()}
        settings |= {keys.tokens: tokens[phase] for phase, keys in unset.items()}
        try:
            plan = plan_of(with_values(config, settings), timed, machines=machines)
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
            return {phase: max(WITHOUT_A_PLAN, least[phase]) for phase in unset}
        for phase in (phase for phase in plan.phases if phase.name in unset):
            size = tokens[phase.name]
            option = plan.times[phase.name] * (1 + OVERHEAD / size), -size
            if phase.name not in best or (phase.peak <= limit and option < best[phase.name]):
                best[phase.name] = option
    found = {phase: -tokens for phase, (_, tokens) in best.items()}
    others = found.get("update actor", found.get("update", WITHOUT_A_PLAN))  # of phases that the plan does not have
    return {phase: found.get(phase, max(others, least[phase])) for phase in unset}


def _least(config: PPOConfig | SupervisedConfig, keys: MicroBatchKeys) -> int:
    """Tokens of the longest sequence (of a pair: both), on each of the ranks that split it."""
    ranks = ranks_per_sequence(sections_of(keys.role).config(config))
    sequences = 2 if isinstance(config, RMConfig | DPOConfig) else 1
    return math.ceil(sequences * longest_lengths(config).total / ranks)
