"""A step as stages of phases: pools work at the same time within a stage, and the models of one pool one after the other.

generation ─► rewards ─► preparation: old log-probs, reference log-probs, values ─► training: critic, actor
"""

from collections.abc import Mapping, Sequence

from lockstep.plan.memory import Phase

STAGES = {
    "generation": ("generate",),
    "rewards": ("reward model",),
    "preparation": ("old log-probs", "reference log-probs", "values"),
    "training": ("update critic", "update actor"),
}
"""Stage -> its phases. The reward model scores before anything else starts."""


def stage_times(phases: Sequence[Phase], times: Mapping[str, float], transfer: float) -> dict[str, float]:
    """Stage -> seconds. times: of each phase. transfer: of weights to a rollout in another pool, at the end of training."""
    found = {}
    for stage, names in STAGES.items():
        busy: dict[str, float] = {}
        for phase in phases:
            if phase.name in names:
                busy[phase.pool] = busy.get(phase.pool, 0.0) + times[phase.name]
        found[stage] = max(busy.values(), default=0.0)
    found["training"] += transfer
    return found
