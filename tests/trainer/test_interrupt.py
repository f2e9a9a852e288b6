"""Stop signals at moments when Python drops the exception that they raise, or acts on it itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.trainer.run.interrupt import Interrupt, stop_on_sigterm


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


@pytest.mark.usefixtures("own_handlers")
def test_an_error_of_code_that_was_interrupted_is_the_stop() -> None:
    with pytest.raises(KeyboardInterrupt), stop_on_sigterm():
        StoppedWhenDeleted(signal.SIGINT)
        raise ValueError("half a config")
    with pytest.raises(ValueError, match="whole"), stop_on_sigterm():
        raise ValueError("of a whole config")


STOPPED_WITHIN_EVAL = """
import os, signal, sys
from lockstep.trainer.run.interrupt import stop_on_sigterm
try:
    with stop_on_sigterm():
        eval("os.kill(os.getpid(), signal.SIGTERM)")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_stop_within_eval_keeps_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED_WITHIN_EVAL)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert subprocess.run([sys.executable, "-m", "stopped"], env=environment, check=False).returncode == 130
