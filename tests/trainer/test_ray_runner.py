"""The driver of a job on Ray, without Ray: what it does if Ray's head process dies."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.trainer import ray_runner

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')


class Console:
    """Delivers messages one by one."""

    ended = False

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = iter(messages)

    def wait(self, timeout_s: float) -> bytes:
        return next(self._messages, b"")


@pytest.mark.parametrize(
    ("messages", "code"), [([b"t", b"d"], 0), ([b"tu"], 130), ([b"t"], 1)], ids=["done", "stopped", "training"]
)
def test_dead_head_process(
    messages: list[bytes], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.single_controller.ray_backend import cluster

    never_ready = SimpleNamespace(wait=lambda refs, timeout: ([], refs))
    monkeypatch.setattr(cluster, "ray", never_ready)
    monkeypatch.setattr(cluster, "head_answers", lambda: False)
    monkeypatch.setattr(ray_runner, "PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr(ray_runner, "LOST_HEAD_AFTER_END_S", 0.0)
    monkeypatch.setattr(ray_runner, "LOST_HEAD_S", 0.05)
    console: Any = Console(messages)
    assert ray_runner._wait("ref", console) == code
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == (code == 1)
    if errors:
        assert "head process (GCS)" in errors[0] and "the same command resumes" in errors[0]
