"""Stop signals at moments when Python drops the exception that they raise."""

import os
import signal
from collections.abc import Iterator

import pytest

from lockstep.trainer.interrupt import Interrupt, stop_on_sigterm


class StoppedWhenDeleted:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        sum(range(10))  # the handler runs before the end of the destructor


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """As in a program that a user starts: in a background job of a shell, Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_within_a_destructor_is_not_lost(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    with stop_on_sigterm():
        StoppedWhenDeleted(number)
        with pytest.raises(KeyboardInterrupt), Interrupt():
            pytest.fail("training has begun")
    assert "Traceback" not in capsys.readouterr().err
    with stop_on_sigterm(), Interrupt() as interrupt:
        assert not interrupt.requested
