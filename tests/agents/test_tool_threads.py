"""Threads of tool calls: used again, unless a call blocks or leaves something behind; nothing of one call reaches the next."""

import asyncio
import os
import sys
import threading
import time
from contextvars import ContextVar

import pytest

from lockstep.agents.tools import threads
from lockstep.agents.tools.threads import run_in_thread

secret: ContextVar[str] = ContextVar("secret", default="none")


@pytest.fixture(autouse=True)
def _no_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads._idle.clear()
    monkeypatch.setattr(threads, "GRACE_S", 0.2)


async def ident() -> int:
    return threading.get_ident()


def test_threads_are_used_again() -> None:
    async def main() -> list[int]:
        return [await run_in_thread(ident, 5.0) for _ in range(5)]

    first, second = asyncio.run(main()), asyncio.run(main())
    assert len({*first, *second}) == 1 and first[0] != threading.get_ident()


def test_calls_run_at_the_same_time() -> None:
    together = threading.Barrier(4)

    async def wait() -> int:
        return together.wait(5.0)

    async def main() -> list[int]:
        return await asyncio.gather(*(run_in_thread(wait, 5.0) for _ in range(4)))

    assert sorted(asyncio.run(main())) == [0, 1, 2, 3]


def test_a_thread_that_blocks_is_left_behind_until_its_call_ends() -> None:
    released = threading.Event()

    async def block() -> int:
        released.wait(30.0)
        return threading.get_ident()

    async def main() -> tuple[int, int]:
        with pytest.raises(TimeoutError):
            await run_in_thread(block, 0.1)
        other = await run_in_thread(ident, 5.0)
        released.set()
        while len(threads._idle) < 2:
            await asyncio.sleep(0.01)
        return other, await run_in_thread(ident, 5.0)

    began = time.monotonic()
    other, again = asyncio.run(main())
    assert other != again and time.monotonic() - began < 10


async def exits() -> None:
    sys.exit(3)


async def exits_in_a_task() -> None:
    await asyncio.create_task(exits())


@pytest.mark.parametrize("call", [exits, exits_in_a_task])
def test_a_call_that_exits_costs_itself_only(call: object) -> None:
    async def main() -> tuple[int, int]:
        before = await run_in_thread(ident, 5.0)
        with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
            await run_in_thread(call, 5.0)  # type: ignore[arg-type]
        return before, await run_in_thread(ident, 5.0)

    before, after = asyncio.run(main())
    assert before == after


def test_nothing_of_a_call_reaches_the_next() -> None:
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(30.0)
        finally:
            ended.append("cancelled")

    async def leave_behind() -> str:
        secret.set("of a call")
        asyncio.create_task(background())  # noqa: RUF006 - what a careless tool does
        await asyncio.sleep(0)
        return secret.get()

    async def read() -> str:
        return secret.get()

    async def main() -> list[str]:
        secret.set("of the caller")
        found = [await run_in_thread(leave_behind, 5.0), await run_in_thread(read, 5.0)]
        while not ended:
            await asyncio.sleep(0.01)
        return found

    assert asyncio.run(main()) == ["of a call", "none"] and ended == ["cancelled"]


def test_what_a_call_leaves_behind_does_not_hold_up_the_next() -> None:
    released = threading.Event()

    async def blocks_when_cancelled() -> None:
        try:
            await asyncio.sleep(30.0)
        finally:
            released.wait(30.0)

    async def leave_behind() -> None:
        asyncio.create_task(blocks_when_cancelled())  # noqa: RUF006 - what a careless tool does
        await asyncio.sleep(0)

    async def main() -> int:
        await run_in_thread(leave_behind, 5.0)
        return await run_in_thread(ident, 1.0)

    try:
        assert asyncio.run(main())
    finally:
        released.set()


def test_helper_threads_that_hang_are_not_inherited() -> None:
    """An event loop has few threads for `asyncio.to_thread`: calls that hang there would use them up."""
    released = threading.Event()

    async def hang() -> bool:
        return await asyncio.to_thread(released.wait, 30.0)

    async def helped() -> int:
        return await asyncio.to_thread(threading.get_ident)

    async def main() -> None:
        for _ in range(33):  # more than an executor of asyncio ever has
            with pytest.raises(TimeoutError):
                await run_in_thread(hang, 0.01)
        assert await run_in_thread(helped, 1.0)

    try:
        asyncio.run(main())
    finally:
        released.set()


def test_a_forked_process_has_no_threads() -> None:
    assert asyncio.run(run_in_thread(ident, 5.0)) and len(threads._idle) == 1
    if (pid := os.fork()) == 0:
        os._exit(len(threads._idle))
    assert os.waitpid(pid, 0)[1] == 0
