import signal
import subprocess
from pathlib import Path

import pytest

from lockstep.utils.child_process import how_it_ended, start_module, wait_or_kill


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that only this process can import."""
    (tmp_path / "child_of_a_test.py").write_text("import sys, time\nprint(sys.argv[1])\ntime.sleep(int(sys.argv[1]))\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "child_of_a_test"


def test_a_child_has_the_import_paths_of_its_parent(module: str) -> None:
    process = start_module(module, 0, stdout=subprocess.PIPE)
    assert process.communicate()[0] == b"0\n"
    assert how_it_ended(process.returncode) == "exited with code 0"


def test_a_child_that_does_not_end_is_killed(module: str) -> None:
    process = start_module(module, 600, stdout=subprocess.DEVNULL)
    wait_or_kill(process, 0.01)
    assert process.returncode == -signal.SIGKILL
    assert how_it_ended(process.returncode) == "was killed by SIGKILL"
