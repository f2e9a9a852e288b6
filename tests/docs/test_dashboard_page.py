"""The commands of docs/dashboard.md that serve: each starts, answers and ends."""

import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason='needs plotly: pip install "lockstep-rl[dashboard]"')

from tests.observability.dashboard.made_runs import make_run

PAGE = Path(__file__).parents[2] / "docs/dashboard.md"
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("lockstep dashboard")]


def test_the_page_has_a_command() -> None:
    assert COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_serve(command: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    words = shlex.split(command.partition("#")[0].replace("$RUN", str(run)))
    program = [sys.executable, "-m", "lockstep.cli", *words[1:], "--port", "0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"dashboard at (http://\S+/)", process.stdout.readline())
            assert found is not None
            with urllib.request.urlopen(f"{found[1]}api/runs") as response:
                assert b'"name":"run"' in response.read()
        finally:
            process.terminate()
        assert process.wait(60) in (0, -15)
