"""Limits on remote calls: no window has more than allowed, in whatever order calls end, in one event loop or several."""

import asyncio
import threading
import time
from itertools import pairwise

import pytest

from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.rewards.managers import NaiveRewardManager, RateLimitedRewardManager, load_reward_manager
from lockstep.rewards.managers.naive import ScoringRow
from lockstep.rewards.rate_limit import RateLimiter, RateLimits, limits_of, shared_limiter

ROWS = [ScoringRow("s", str(i), "t", {"index": i}, 1) for i in range(8)]


def reserved(limits: RateLimits, num_calls: int, tokens: int = 0) -> list[float]:
    """When each of many calls may begin that are asked for at once."""
    limiter = RateLimiter(limits)
    return [limiter._reserve(tokens).time for _ in range(num_calls)]


def most_in_a_window(times: list[float], window_s: float) -> int:
    return max(sum(begin <= t < begin + window_s for t in times) for begin in times)


def test_no_window_has_more_calls_than_allowed() -> None:
    times = reserved(RateLimits(max_rpm=3), 10)
    assert times == sorted(times) and most_in_a_window(times, 59.999) == 3
    assert 179.9 < times[-1] - times[0] < 180.1  # and no time is lost


def test_no_window_has_more_tokens_than_allowed() -> None:
    assert most_in_a_window(reserved(RateLimits(max_tpm=100), 7, tokens=40), 59.999) == 2
    alone = reserved(RateLimits(max_tpm=100), 3, tokens=500)  # more than a window allows
    assert all(later - earlier > 59.999 for earlier, later in pairwise(alone))


def test_calls_wait_for_their_time() -> None:
    limiter, began = RateLimiter(RateLimits(max_rpm=2, window_s=0.2)), time.monotonic()

    async def call() -> float:
        async with limiter.slot():
            return time.monotonic() - began

    async def main() -> list[float]:
        return await asyncio.gather(*(call() for _ in range(5)))

    starts = asyncio.run(main())
    assert all(start >= earliest for start, earliest in zip(starts, (0, 0, 0.2, 0.2, 0.4)))


def test_calls_that_wait_while_a_server_asks_for_a_pause_do_not_begin_all_at_once() -> None:
    limiter = RateLimiter(RateLimits(max_rpm=3, window_s=0.4))
    began: list[float] = []

    async def call() -> None:
        async with limiter.slot():
            began.append(time.monotonic())
            if len(began) == 1:
                limiter.pause(0.3)

    async def main() -> None:
        await asyncio.gather(*(call() for _ in range(8)))

    asyncio.run(main())
    began.sort()
    assert most_in_a_window(began, 0.3) == 3  # a call may begin a little later than it was allowed to
    assert all(later - began[0] > 0.29 for later in began[3:]) and began[-1] - began[0] < 2.0


def test_calls_at_once_in_several_event_loops() -> None:
    limiter, running, most = RateLimiter(RateLimits(max_concurrent=3)), [0], [0]
    lock = threading.Lock()

    async def call() -> None:
        async with limiter.slot():
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            await asyncio.sleep(0.01)
            with lock:
                running[0] -= 1

    async def main() -> None:
        await asyncio.gather(*(call() for _ in range(10)))

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == [3] and limiter._num_running == 0


def test_a_cancelled_call_gives_its_slot_back() -> None:
    limiter = RateLimiter(RateLimits(max_concurrent=1))

    async def main() -> None:
        async def hold() -> None:
            async with limiter.slot():
                await asyncio.sleep(60)

        holder, waiter = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0.01)
        waiter.cancel()
        holder.cancel()
        await asyncio.gather(holder, waiter, return_exceptions=True)
        async with asyncio.timeout(1), limiter.slot():
            pass

    asyncio.run(main())
    assert limiter._num_running == 0


def test_a_pause_holds_all_calls() -> None:
    limiter = RateLimiter(RateLimits())
    began = time.monotonic()
    limiter.pause(0.15)

    async def call() -> float:
        async with limiter.slot():
            return time.monotonic() - began

    assert asyncio.run(call()) >= 0.15


def test_the_manager_limits_coroutine_functions_and_waiting_is_no_timeout() -> None:
    async def remote(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, int]) -> float:
        if solution_str == "3":
            raise ConnectionError("the service answered 500")
        return float(solution_str)

    limiter, began = RateLimiter(RateLimits(max_concurrent=4, max_rpm=4, window_s=0.7)), time.monotonic()
    scores, extra = RateLimitedRewardManager(None, 0, remote, timeout_s=0.5, limiter=limiter).score_rows(ROWS)
    assert scores == [0, 1, 2, 0, 4, 5, 6, 7]
    assert extra["reward_failed"] == [0, 0, 0, 1, 0, 0, 0, 0]  # the failed row is counted
    assert time.monotonic() - began >= 0.7


def test_settings_of_the_config() -> None:
    settings = RewardModelConfig(reward_manager="rate_limited", max_concurrent=2, max_rpm=600, max_tpm=9000)
    assert limits_of(settings) == RateLimits(2, 600, 9000, 2000)
    # training and validation share one
    assert shared_limiter(limits_of(settings)) is shared_limiter(limits_of(settings))
    with pytest.raises(
        ValueError, match=r"limit coroutine functions and judges; define .*default_compute_score with `async def`"
    ):
        load_reward_manager(PPOConfig(reward_model=settings), None, 0)
    prime = RewardModelConfig(reward_manager="prime", max_rpm=1)
    with pytest.raises(ValueError, match="reward_manager=prime has no limits on calls; set rate_limited"):
        load_reward_manager(PPOConfig(reward_model=prime), None, 0)


def test_rate_limited_needs_a_coroutine_function() -> None:
    assert isinstance(NaiveRewardManager(None, 0, lambda **row: 1.0), NaiveRewardManager)
    with pytest.raises(ValueError, match="with `async def`"):
        RateLimitedRewardManager(None, 0, lambda **row: 1.0)
