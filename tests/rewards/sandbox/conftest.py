"""The forms of isolation that this machine gives, and a check that no process is left."""

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.rewards.sandbox import process
from lockstep.rewards.sandbox.process import VARIABLE, Form, failure


@pytest.fixture(params=["bubblewrap", "namespaces", "landlock"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    """The test runs once per form; forms that do not work here are skipped."""
    problem = failure(request.param)
    if problem:
        pytest.skip(f"{request.param}: {problem}")
    monkeypatch.setenv(VARIABLE, request.param)
    return request.param


@pytest.fixture(autouse=True)
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mark the guards of this test, and so all that is forked from them without exec; none is left at the end."""
    marker = f"guard-{uuid.uuid4()}"
    monkeypatch.setattr(process, "BOOTSTRAP", f"# {marker}\n{process.BOOTSTRAP}")
    yield
    assert ends(marker)


def ends(marker: str) -> bool:
    """Whether all processes with `marker` in their command line end within a few seconds."""
    deadline = time.monotonic() + 5
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes_with(marker)


def processes_with(text: str) -> set[int]:
    """Processes of this machine with `text` in their command line."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and text.encode() in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found
