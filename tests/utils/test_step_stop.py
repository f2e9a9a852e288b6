"""Giving up a step: what the main thread is in decides how; worker processes are told by a line."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from lockstep.utils import event_loop, step_stop
from lockstep.utils.step_stop import StepDiscarded


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    before = signal.signal(signal.SIGURG, lambda number, frame: step_stop.discard())
    yield
    signal.signal(signal.SIGURG, before)
    step_stop.end()


def signal_soon(after_s: float = 0.05) -> None:
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGURG)).start()


def test_only_between_begin_and_commit() -> None:
    step_stop.discard()
    step_stop.begin()
    step_stop.commit()
    step_stop.discard()
    assert not step_stop.was_discarded() and not step_stop.generation_stopped.is_set()
    step_stop.begin()
    with pytest.raises(StepDiscarded):
        step_stop.discard()
    assert step_stop.was_discarded() and step_stop.generation_stopped.is_set()
    step_stop.discard()  # once
    step_stop.end()
    assert not step_stop.generation_stopped.is_set()


def test_a_wait_is_interrupted() -> None:
    step_stop.begin()
    signal_soon()
    with pytest.raises(StepDiscarded):
        threading.Event().wait(60)


def test_a_call_of_a_worker_ends_by_itself() -> None:
    step_stop.begin()
    ended = False
    with pytest.raises(StepDiscarded):
        with step_stop.shielded():
            step_stop.discard()
            assert step_stop.generation_stopped.is_set()
            ended = True
        pytest.fail("it goes on")
    assert ended
    step_stop.begin()
    with pytest.raises(StepDiscarded), step_stop.shielded():  # the error is a consequence of the stop
        step_stop.discard()
        raise ValueError("half a batch")


def test_an_event_loop_cleans_up() -> None:
    cleaned: list[str] = []

    async def inner() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append("inner")

    async def main() -> None:
        try:
            await event_loop.all_of([inner(), inner()])
        finally:
            cleaned.append("main")

    step_stop.begin()
    signal_soon()
    with pytest.raises(StepDiscarded):
        event_loop.run(main)
    assert cleaned == ["inner", "inner", "main"]
    step_stop.commit()
    assert event_loop.run(lambda: asyncio.sleep(0, "result")) == "result"


def test_what_would_be_lost_is_kept() -> None:
    step_stop.begin()
    with step_stop.shielded():
        step_stop.discard()
        step_stop.keep()
    step_stop.commit()
    assert not step_stop.was_discarded()


def test_line_to_worker_processes() -> None:
    line = step_stop.StopLine("127.0.0.1")
    try:
        step_stop.listen(line.address)
        end = time.monotonic() + 10
        while not line._connections and time.monotonic() < end:
            time.sleep(0.01)
        line.call()
        assert step_stop.generation_stopped.wait(10)
    finally:
        line.close()


def test_a_line_that_cannot_be_reached_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    line = step_stop.StopLine("127.0.0.1")
    line.close()
    step_stop.listen(line.address)
    assert "trainer.preemption_grace_s" in caplog.text
