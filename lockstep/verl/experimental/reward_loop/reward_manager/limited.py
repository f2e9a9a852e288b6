"""verl.experimental.reward_loop.reward_manager.limited: limits on the calls of a reward function that asks a remote service."""

import asyncio
import logging
from typing import Any, ClassVar

from lockstep.protocol import DataProto
from lockstep.rewards.rate_limit import RateLimiter, RateLimits, shared_limiter
from lockstep.utils.untrusted import message_of
from lockstep.verl.experimental.reward_loop.reward_manager.base import RewardManagerBase, as_result

logger = logging.getLogger(__name__)


class AsyncTokenBucket:
    """A bucket that starts full and refills at `rate_limit` tokens per second, up to `max_tokens` (None: one second's worth).

    `acquire` waits until the bucket holds the tokens; more than fit in the bucket are waited for at the rate.
    """

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        self.rate_limit = rate_limit
        self.max_tokens = max_tokens or rate_limit
        self.tokens = self.max_tokens
        self.last_update: float | None = None
        self.lock = asyncio.Lock()

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Take tokens, in the order of the calls."""
        async with self.lock:
            self._refill()
            missing = num_tokens - self.tokens
            self.tokens -= num_tokens
            if missing <= 0:
                return
            if num_tokens <= self.max_tokens:  # later calls wait behind this one
                await asyncio.sleep(missing / self.rate_limit)
                self._refill()
                return
        await asyncio.sleep(missing / self.rate_limit)

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        since = now - (now if self.last_update is None else self.last_update)
        self.tokens = min(self.max_tokens, self.tokens + since * self.rate_limit)
        self.last_update = now


class RateLimitedRewardManager(RewardManagerBase):
    """Calls of the reward function under `reward_model.max_concurrent` (1), `max_rpm`, `max_tpm` and `timeout` (300 s).

    The limits are shared by all managers of the process; the first one sets them. A call that fails or takes too long scores 0.
    """

    _limiter: ClassVar[RateLimiter | None] = None
    _max_concurrent: ClassVar[int | None] = None
    _max_rpm: ClassVar[int | None] = None
    _max_tpm: ClassVar[int | None] = None
    _timeout: ClassVar[float] = 300.0

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        settings = config.get("reward_model") or {}
        if cls._class_initialized:
            wanted = settings.get("max_rpm"), settings.get("max_tpm")
            if wanted not in ((None, None), (cls._max_rpm, cls._max_tpm)):
                logger.warning(
                    "max_rpm=%s, max_tpm=%s have no effect: the limits of this process are max_rpm=%s, max_tpm=%s",
                    *(*wanted, cls._max_rpm, cls._max_tpm),
                )
            return
        cls._max_concurrent = settings.get("max_concurrent") or 1
        cls._max_rpm, cls._max_tpm = settings.get("max_rpm"), settings.get("max_tpm")
        cls._timeout = float(settings.get("timeout") or 300.0)
        tokens = settings.get("estimated_tokens_per_request", 2000)
        cls._limiter = shared_limiter(RateLimits(cls._max_concurrent, cls._max_rpm, cls._max_tpm, tokens))
        cls._class_initialized = True

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        assert self._limiter is not None
        async with self._limiter.slot():
            try:
                return as_result(await asyncio.wait_for(self.score_of(data), self._timeout))
            except TimeoutError:
                logger.warning("the reward function took longer than %g s; the row scores 0", self._timeout)
                return {"reward_score": 0.0, "reward_extra_info": {"timeout": True, "acc": 0.0}}
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything: it costs its own row
                message = message_of(error)
                logger.warning("the reward function failed: %s: %s; the row scores 0", type(error).__name__, message)
                return {"reward_score": 0.0, "reward_extra_info": {"error": message, "acc": 0.0}}
