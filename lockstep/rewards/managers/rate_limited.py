"""The rate-limited reward manager (verl's `rate_limited`): for coroutine functions that call a remote service."""

from dataclasses import dataclass, field

from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager
from lockstep.rewards.rate_limit import RateLimiter, RateLimits


@REWARD_MANAGERS.register("rate_limited")
@dataclass(eq=False, repr=False)
class RateLimitedRewardManager(NaiveRewardManager):
    """Like naive, but the function must be a coroutine function: a call that waits for its turn must not hold a process.

    The limits are `reward_model.max_concurrent`, `max_rpm` and `max_tpm`. Waiting for them does not count for `timeout_s`.
    """

    max_concurrency: int = field(default=64, init=False)
    num_workers: int | None = field(default=None, init=False)
    limiter: RateLimiter | None = field(default_factory=lambda: RateLimiter(RateLimits()))
