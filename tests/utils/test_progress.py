"""Phases and counts of what a process does, and the log lines of those that take long."""

import logging
import threading
import time

import pytest

from lockstep.utils import progress
from lockstep.utils.progress import ProgressLog, count, describe, phase, show_live
from lockstep.utils.timing import marked_timer


def test_phases_are_nested() -> None:
    count(1, 2, "sequences")  # outside of a phase
    assert describe() == ("", 0.0)
    with phase("validation"), phase("generate"):
        count(3, 16, "sequences")
        assert describe()[0] == "validation, generate 3/16 sequences"
    assert describe()[0] == ""


def test_an_exception_ends_the_phases_within() -> None:
    def mini_batches():
        for number in (1, 2):
            with phase(f"mini-batch {number} of 2:"):
                yield number

    with pytest.raises(KeyError), phase("update actor"):
        for _ in mini_batches():
            count(3, 4, "micro-batches")
            assert describe()[0] == "update actor, mini-batch 1 of 2: 3/4 micro-batches"
            raise KeyError
    assert describe()[0] == ""


def test_threads_have_their_own_phases() -> None:
    """Rewards are computed while samples are generated."""
    entered, leave = threading.Event(), threading.Event()

    def rewards() -> None:
        with phase("rewards"):
            count(3, 8)
            entered.set()
            leave.wait()

    thread = threading.Thread(target=rewards)
    with phase("generate"):
        thread.start()
        entered.wait()
        count(5, 16, "prompts")
        assert describe()[0] == "generate 5/16 prompts, rewards 3/8"
        leave.set()
        thread.join()
        assert describe()[0] == "generate 5/16 prompts"
    assert describe()[0] == ""


def test_a_long_call_is_mentioned() -> None:
    with phase("rewards"):
        count(12, 256, call_began=time.monotonic() - 30)
        assert describe()[0] == "rewards 12/256, one call running for 30 s"
        count(13, 256, call_began=time.monotonic())
        assert describe()[0] == "rewards 13/256"


def test_only_known_timers_are_phases() -> None:
    timing: dict[str, float] = {}
    with marked_timer("step", timing), marked_timer("update_actor", timing):
        assert describe()[0] == "update actor"
    assert sorted(timing) == ["step", "update_actor"]


def test_long_phases_are_logged_and_short_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=progress.__name__)
    with ProgressLog(interval_s=0.2):
        for _ in range(4):
            with phase("short"):
                time.sleep(0.1)
        assert not caplog.messages
        with phase("generate"):
            count(1, 2, "sequences")
            time.sleep(0.7)
        with phase("shown"):
            show_live(True)
            time.sleep(0.4)
            show_live(False)
    assert 2 <= len(caplog.messages) <= 3 and all(
        m.startswith("generate 1/2 sequences, 0 s") for m in caplog.messages[:1]
    )
    assert "shown" not in caplog.text
