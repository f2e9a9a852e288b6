"""Limits on calls to a remote service: at once, per minute, and tokens per minute.

    async with limiter.slot(tokens): call        waits until the call may begin

No window of a minute has more calls or tokens than allowed. One limiter serves several event loops in several threads: its state
is plain numbers under a lock, and each waiter sleeps in its own loop.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache

from lockstep.config.reward import RewardFunctionConfig

DEFAULT_CONCURRENT = 64


@dataclass(frozen=True)
class RateLimits:
    """`reward_model.max_concurrent`, `max_rpm`, `max_tpm` and `estimated_tokens_per_request`; None has no limit."""

    max_concurrent: int = DEFAULT_CONCURRENT
    max_rpm: int | None = None
    max_tpm: int | None = None
    estimated_tokens: int = 0
    window_s: float = 60.0


@dataclass
class _Start:
    """When a call may begin, and the tokens that it counts."""

    time: float
    tokens: int


class RateLimiter:
    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._num_running = 0
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._starts: deque[_Start] = deque()  # those that count for the window, in order
        self._paused_until = 0.0

    @asynccontextmanager
    async def slot(self, tokens: int | None = None) -> AsyncIterator[None]:
        """A call begins inside. tokens: those that it counts; None is the estimate of the limits."""
        await self._enter()
        try:
            start = self._reserve(self.limits.estimated_tokens if tokens is None else tokens)
            while (wait_s := start.time - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            yield
        finally:
            self._leave()

    def pause(self, seconds: float) -> None:
        """Let no call begin for a while. Calls that wait for their time move by the same delay, so windows stay within limits."""
        with self._lock:
            now = time.monotonic()
            self._paused_until = max(self._paused_until, now + seconds)
            waiting = [start for start in self._starts if start.time > now]
            delay_s = max(0.0, self._paused_until - waiting[0].time) if waiting else 0.0
            for start in waiting:
                start.time += delay_s

    def _reserve(self, tokens: int) -> "_Start":
        """The earliest time at which a call may begin, after those that were reserved before it."""
        limits = self.limits
        with self._lock:
            now = time.monotonic()
            while self._starts and self._starts[0].time <= now - limits.window_s:
                self._starts.popleft()
            begin = max(now, self._paused_until, self._starts[-1].time if self._starts else now)
            if limits.max_rpm is not None and len(self._starts) >= limits.max_rpm:
                begin = max(begin, self._starts[-limits.max_rpm].time + limits.window_s)
            if limits.max_tpm is not None:
                tokens = min(tokens, limits.max_tpm)  # a larger one has a window for itself
                total = tokens
                for earlier in reversed(self._starts):
                    total += earlier.tokens
                    if total > limits.max_tpm:
                        begin = max(begin, earlier.time + limits.window_s)
                        break
            start = _Start(begin, tokens)
            self._starts.append(start)
            return start

    async def _enter(self) -> None:
        with self._lock:
            if self._num_running < self.limits.max_concurrent:
                self._num_running += 1
                return
            loop = asyncio.get_running_loop()
            turn: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                is_waiting = (loop, turn) in self._waiters
                if is_waiting:
                    self._waiters.remove((loop, turn))
            if not is_waiting:  # the slot was handed over meanwhile
                self._leave()
            raise

    def _leave(self) -> None:
        """Hand the slot to the first that waits, or free it."""
        with self._lock:
            while self._waiters:
                loop, turn = self._waiters.popleft()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_set_done, turn)
                    return
            self._num_running -= 1


def _set_done(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)


@lru_cache
def shared_limiter(limits: RateLimits) -> RateLimiter:
    """One limiter per process for equal limits: training and validation call the same service."""
    return RateLimiter(limits)


def limits_of(config: RewardFunctionConfig) -> RateLimits:
    return RateLimits(
        max_concurrent=config.max_concurrent or DEFAULT_CONCURRENT,
        max_rpm=config.max_rpm,
        max_tpm=config.max_tpm,
        estimated_tokens=config.estimated_tokens_per_request,
    )


def has_limits(config: RewardFunctionConfig) -> bool:
    return any(limit is not None for limit in (config.max_concurrent, config.max_rpm, config.max_tpm))
