"""Every tutorial runs from top to bottom: its files are written, its commands run in order, and print what the page shows.

Of what is shown, numbers other than those of steps may differ, `...` is any text, and lines may be left out.
"""

import io
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep import cli
from tests.programs import Program, run_python

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NUMBER = r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?"
ON_RAY = "scaling_out"
"""Its run on two workers joins the tests' cluster instead of starting one."""


class Reader:
    """Does what the reader of a tutorial does, in the current folder.

    printed: what the commands since the last block of output have printed.
    """

    def __init__(self, capture: pytest.CaptureFixture[str], servers: ExitStack, port: int) -> None:
        self._capture, self._servers, self._port = capture, servers, port
        self.printed = ""

    def do(self, language: str, text: str) -> None:
        text = text.replace("8000", str(self._port))
        if language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                self.printed += self._run(line)
        elif language:
            name = re.match(r"# ([\w.]+)\n", text)
            assert name is not None, f"a file's first line is a comment with its name: {text[:80]}"
            Path(name[1]).write_text(text)
        else:
            missing = first_missing(text, self.printed)
            assert missing is None, f"not printed: {missing}\n--- printed:\n{self.printed}"
            self.printed = ""

    def _run(self, line: str) -> str:
        program, *words = shlex.split(line, comments=True)
        if [program, *words[:1]] == ["lockstep", "serve"]:
            return self._servers.enter_context(server(words[1:]))
        if program not in ("lockstep", "python"):
            result = subprocess.run(
                line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
            )
            code, printed = result.returncode, result.stdout
        else:
            with logged() as log:
                code = cli.main(words) if program == "lockstep" else run_python(words)
            out, err = self._capture.readouterr()
            printed = "\n".join(
                [log.getvalue(), err, out]
            )  # a controller's log lines are in err, and come before its steps
        assert code == 0, f"{line}\n{printed}"
        return printed


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """The log lines of what runs inside, as the command shows them. A controller on Ray takes over the format."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield log
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def server(words: list[str]) -> Iterator[str]:
    """`lockstep serve` until the page ends; what it has printed when it is ready."""
    program = Program("lockstep.serve", words, Path.cwd())
    try:
        assert program.until(lambda: "serving" in program.stdout), program.stderr
        yield program.stdout
    finally:
        program.signal(signal.SIGINT)
        program.wait()


def first_missing(shown: str, printed: str) -> str | None:
    """The first line of a page that was not printed after those before it."""
    lines = iter(printed.splitlines())
    for line in filter(None, map(str.strip, shown.splitlines())):
        words = re.split(rf"(\bstep \d+\b|\.\.\.|{NUMBER})", line)
        parts = [re.escape(word) for word in words]
        for index in range(1, len(words), 2):
            if not words[index].startswith("step"):
                parts[index] = ".*" if words[index] == "..." else NUMBER
        pattern = re.sub(r"(\\ )+", r"\\s+", "".join(parts))
        if line != "..." and not any(re.search(pattern, printed_line) for printed_line in lines):
            return line
    return None


def test_what_a_page_shows_is_looked_for_in_order() -> None:
    printed = "step 1 | reward 0.25 | 4,600 tok/s\nnoise\nstep 2 | reward -1e-05 | 9 tok/s\n"
    assert first_missing("step 1 | reward 0.3 | ...\n...\nstep 2 | reward 0.5", printed) is None
    assert first_missing("step 2 | reward 0.5\nstep 1 | reward 0.3", printed) == "step 1 | reward 0.3"
    assert first_missing("step 1 | loss 0.3", printed) == "step 1 | loss 0.3"


@pytest.mark.slow
@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_tutorial_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    text = page.read_text()
    assert ("n_gpus_per_node=2" in text) == (page.stem == ON_RAY)
    if page.stem == ON_RAY:
        request.getfixturevalue("ray_cluster")
    if "lockstep serve" in text:
        pytest.importorskip("starlette")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as servers:
        reader = Reader(capfd, servers, port)
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
            reader.do(language, block)


def test_tutorials_are_short() -> None:
    assert TUTORIALS
    for page in TUTORIALS:
        assert 60 <= len(page.read_text().splitlines()) <= 150, page.name
