"""Wall-clock time of the phases of a step, collected in a dict and recorded as spans; the long ones are also shown as progress."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from lockstep.utils.progress import phase
from lockstep.utils.spans import span

PHASES = {
    "gen_max": "greedy baselines",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "adv": "advantages",
    "update_critic": "update critic",
    "update_actor": "update actor",
    "update_weights": "send weights to the rollout",
    "save_checkpoint": "save checkpoint",
    "dump_rollouts": "write rollouts",
}
"""Timer to the name of its phase; generation, rewards and validation name theirs themselves."""


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the block's duration in seconds to `timing_raw[name]`, even if it raises."""
    start = time.perf_counter()
    try:
        with span(name), phase(PHASES[name]) if name in PHASES else nullcontext():
            yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start
