"""The driver of a job on Ray, without Ray: what it does if Ray's head process dies."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.observability.jsonl import truncate_after
from lockstep.observability.trackers import Tracking
from lockstep.trainer.run import ray_runner
from lockstep.trainer.run.errors import RunError

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
def test_dead_head_process(messages: list[bytes], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.single_controller.ray_backend import cluster

    never_ready = SimpleNamespace(wait=lambda refs, timeout: ([], refs))
    monkeypatch.setattr(cluster, "ray", never_ready)
    monkeypatch.setattr(cluster, "head_answers", lambda: False)
    monkeypatch.setattr(ray_runner, "PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr(ray_runner, "LOST_HEAD_AFTER_END_S", 0.0)
    monkeypatch.setattr(ray_runner, "LOST_HEAD_S", 0.05)
    console: Any = Console(messages)
    if code != 1:
        assert ray_runner._wait("ref", console) == code
        return
    with pytest.raises(RunError, match=r"head process \(GCS\).*the same command resumes"):
        ray_runner._wait("ref", console)


def test_sigterm_is_forwarded_even_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.single_controller.ray_backend import cluster

    class Signalled:
        ended = False

        def __init__(self) -> None:
            self.sent: list[bytes] = []
            self.signals = [None, signal.SIGINT, signal.SIGTERM, None]

        def wait(self, timeout_s: float) -> bytes:
            if (number := self.signals.pop(0)) is not None:
                os.kill(os.getpid(), number)
            return b"t"

        def send(self, message: bytes) -> None:
            self.sent.append(message)

    console: Any = Signalled()
    ray = SimpleNamespace(
        wait=lambda refs, timeout: ([], refs) if console.signals else (refs, []),
        get=lambda ref: 130,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    monkeypatch.setattr(cluster, "ray", ray)
    assert ray_runner._wait("ref", console, grace_s=60.0) == 130
    assert console.sent == [b"s", ray_runner.PREEMPT]


def test_a_runner_that_was_stuck_and_ended_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.single_controller.ray_backend import cluster

    class RayError(Exception):
        pass

    def get(ref: str) -> None:
        raise RayError

    ended = SimpleNamespace(
        wait=lambda refs, timeout: (refs, []), get=get, exceptions=SimpleNamespace(RayError=RayError)
    )
    monkeypatch.setattr(cluster, "ray", ended)
    (tmp_path / "status.json").write_text('{"state": "failed", "reason": "no progress in rewards"}')
    console: Any = Console([b"th"])
    with pytest.raises(RunError, match="no progress in rewards") as raised:
        ray_runner._wait("ref", console, folder=tmp_path)
    assert raised.value.exit_code == 3


def test_sigterm_while_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's handler calls ours and sets an alarm; stopping its processes may take longer than that."""
    from lockstep.single_controller.ray_backend import cluster

    def connect(**settings: Any) -> bool:
        signal.alarm(100)
        raise SystemExit(1)

    monkeypatch.setattr(cluster, "connect", connect)
    with pytest.raises(KeyboardInterrupt):
        ray_runner._connect(PPOConfig())
    assert signal.alarm(0) == 0


def test_steps_are_read_from_the_metrics_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    clock = iter(range(100, 200))
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    with Tracking("p", "e", [], run_dir=tmp_path) as tracking:
        tracking.log({"x": 0.0}, step=7)  # of an earlier run
        steps = ray_runner._Steps(lambda step, metrics: bool(seen.append((step, metrics))) or step == 9, tmp_path)
        assert not steps.read()
        tracking.log({"x": 1.0}, step=8)
        assert not steps.read() and not steps.read()
        tracking.log({"x": 2.0}, step=9)
        assert steps.read()
    truncate_after(tmp_path / "metrics.jsonl", 7)  # a restart
    with Tracking("p", "e", [], run_dir=tmp_path) as tracking:
        tracking.log({"x": 3.0}, step=8)
        assert not steps.read()
    assert seen == [(8, {"x": 1.0}), (9, {"x": 2.0}), (8, {"x": 3.0})]


def test_gpus_that_ray_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.single_controller.ray_backend import cluster

    asked: list[Any] = []
    monkeypatch.setattr(cluster, "has_gpus", lambda: False)
    monkeypatch.setattr(cluster, "require_machines", lambda pool, bundles: asked.append(bundles))

    def check(*overrides: str) -> None:
        ray_runner._check_machines(load_config(PPOConfig, overrides, run_checks=False))

    with pytest.raises(
        ValueError, match=r"n_gpus_per_node asks for 8 GPUs.*trainer.device=cpu to train in 8 CPU processes"
    ):
        check("trainer.n_gpus_per_node=8")
    with pytest.raises(ValueError, match="resource_pool_spec asks for 3 GPUs"):
        check("resource_pool_spec={a: [2], b: [1]}")
    assert not asked
    check("trainer.n_gpus_per_node=8", "trainer.device=cpu")
    check("trainer.n_gpus_per_node=1", "trainer.controller=ray")
    assert asked == [[{"CPU": 8}], [{"CPU": 1}]]
