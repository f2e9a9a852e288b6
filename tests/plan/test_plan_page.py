"""The commands of docs/plan.md and docs/large_models.md run, and their figures are those of the code."""

import re
import shlex
from pathlib import Path

import pytest

from lockstep.cli import main
from tests.plan.test_plan import write_model

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("plan.md", "large_models.md")}
COMMANDS = [
    pytest.param(page, command.replace("\\\n", " "), marks=[pytest.mark.slow] if "strategy=megatron" in command else [])
    for page, text in PAGES.items()
    for command in re.findall(r"```bash\n(lockstep plan .*?)```", text, flags=re.S)
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The model of docs/plan.md; the shapes of docs/large_models.md are written by its script."""
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(# shapes.py\n.*?)```", PAGES["large_models.md"], flags=re.S)
    exec(compile(script, "shapes.py", "exec"), {})
    return str(write_model(tmp_path / "model", "1.5b"))


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands(page: str, command: str, places: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.replace("$MODEL", places))
    assert words[0] == "lockstep" and main(words[1:]) == 0
    shown = capsys.readouterr().out
    if "--search" in words:
        assert "add to the command:" in shown
    else:
        assert shown.splitlines()[-1] in PAGES[page]
