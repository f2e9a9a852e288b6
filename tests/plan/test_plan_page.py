"""The commands of docs/plan.md run, and its figures are those of the code."""

import re
import shlex
from pathlib import Path

import pytest

from lockstep.cli import main
from tests.plan.test_plan import write_model

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
COMMANDS = [block.replace("\\\n", " ") for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.replace("$MODEL", str(write_model(tmp_path / "model", "1.5b"))))
    assert words[0] == "lockstep" and main(words[1:]) == 0
    shown = capsys.readouterr().out
    if "--search" in words:
        assert "add to the command:" in shown
    else:
        assert shown.splitlines()[-1] in PAGE
