"""The rate-limited reward manager (verl's `rate_limited`): for coroutine functions that call a remote service."""

from typing import Any

from lockstep.rewards.custom import ComputeScore
from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager
from lockstep.rewards.rate_limit import RateLimiter, RateLimits


@REWARD_MANAGERS.register("rate_limited")
class RateLimitedRewardManager(NaiveRewardManager):
    """Like naive, but the function must be a coroutine function: a call that waits for its turn must not hold a process.

    The limits are `reward_model.max_concurrent`, `max_rpm` and `max_tpm`. Waiting for them does not count for `timeout_s`.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        timeout_s: float | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        limiter = limiter or RateLimiter(RateLimits())
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, timeout_s, limiter=limiter)
