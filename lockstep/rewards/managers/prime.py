"""The prime reward manager: scores samples in worker processes, whatever the function."""

from dataclasses import dataclass, field
from typing import ClassVar

from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager
from lockstep.rewards.rate_limit import RateLimiter


@REWARD_MANAGERS.register("prime")
@dataclass(eq=False, repr=False)
class PrimeRewardManager(NaiveRewardManager):
    """Like naive, always in worker processes: coroutine functions and built-in scorers too.

    The function must be importable by name in a fresh process: defined at the top level of a module or of the file in
    `custom_reward_function.path`. A call that hangs or crashes fails only its own sample.
    """

    always_workers: ClassVar[bool] = True

    timeout_s: float | None = 300.0
    max_concurrency: int = field(default=64, init=False)
    limiter: RateLimiter | None = field(default=None, init=False)
