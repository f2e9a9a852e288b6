"""Calls in an event loop."""

import asyncio

import pytest

from lockstep.utils import event_loop
from lockstep.utils.event_loop import all_of


def test_all_of_waits_for_the_clean_up_of_cancelled_calls() -> None:
    released = []

    async def holds() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            for part in ("first", "second"):
                await asyncio.sleep(0.01)
                released.append(part)

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        asyncio.run(all_of([holds(), fails()]))
    assert released == ["first", "second"]

    async def cancelled() -> None:
        task = asyncio.create_task(all_of([holds()]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(released) == 4

    asyncio.run(cancelled())


def test_run_inside_of_a_running_loop() -> None:
    async def two() -> int:
        await asyncio.sleep(0)
        return 2

    async def notebook() -> int:
        return event_loop.run(two)

    assert event_loop.run(two) == asyncio.run(notebook()) == 2
