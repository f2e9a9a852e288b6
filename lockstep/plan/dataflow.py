"""A step as stages of phases: pools work at the same time within a stage, and the models of one pool one after the other.

generation ─► rewards ─► preparation: old log-probs, reference log-probs, values ─► training: critic, actor
"""

from collections.abc import Mapping, Sequence

from lockstep.plan.memory import Phase

STAGES = {
    "generation": ("generate",),
    "rewards": ("reward model",),
    "preparation": ("old log-probs", "reference log-probs", "values"),
    "training": ("update critic", "update actor", "update"),
}
"""Stage -> its phases. The reward model scores before anything else starts."""


def stage_times(phases: Sequence[Phase], times: Mapping[str, float], transfer: float) -> dict[str, float]:
    """Stage -> seconds. times: of each phase. transfer: of weights to a rollout in another pool, at the end of training."""
    pools = {phase.pool for phase in phases}
    return slowest_pool([busy_time([p for p in phases if p.pool == pool], times) for pool in pools], transfer)


def busy_time(phases: Sequence[Phase], times: Mapping[str, float]) -> dict[str, float]:
    """Stage -> seconds that the phases of one pool take."""
    return {stage: sum(times[phase.name] for phase in phases if phase.name in names) for stage, names in STAGES.items()}


def slowest_pool(busy: Sequence[Mapping[str, float]], transfer: float) -> dict[str, float]:
    """Stage -> seconds until all pools are done. busy: stage -> seconds of each pool."""
    found = {stage: max(pool[stage] for pool in busy) for stage in STAGES}
    found["training"] += transfer
    return found
