"""The health panel: its JSON, live events, and the page beside a run that trains."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.observability.dashboard import health_view
from lockstep.observability.dashboard.api import health as health_api
from lockstep.observability.dashboard.app import DashboardApp, _events_of
from lockstep.observability.dashboard.health_view import is_alive
from lockstep.observability.dashboard.runs import Runs
from lockstep.observability.jsonl import json_line
from tests.observability.dashboard.conftest import OpenPage, Serve
from tests.observability.dashboard.made_runs import make_run, step_metrics
from tests.observability.dashboard.test_app import get, status_of

ROOT = Path(__file__).parents[3]


def write_status(run: Path, **changes: Any) -> None:
    status = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.time() - 100,
        "time": time.time(),
        "state": "running",
        "reason": None,
        "step": 20,
        "total_steps": 40,
        "phases": [[{"name": "generate", "began": time.time() - 3, "done": 5, "total": 16, "unit": "sequences"}]],
        "step_seconds": [4.0, 6.0],
        "seconds_left": 100.0,
    }
    (run / "status.json").write_text(json.dumps(status | changes))


def plant(run: Path, steps: int = 40, **values: float) -> None:
    """Write metrics anew, with these values in each step; `a__b` is the metric a/b."""
    changed = {name.replace("__", "/"): value for name, value in values.items()}
    lines = [
        json_line({"step": step, "time": 1.7e9 + step} | step_metrics(step, steps) | changed)
        for step in range(1, steps + 1)
    ]
    (run / "metrics.jsonl").write_bytes(b"".join(lines))


def test_what_a_run_is_doing(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_status(run)
    url = serve(tmp_path)
    status = get(f"{url}/api/status?run=run")
    assert (status["state"], status["step"], status["total_steps"], status["seconds_left"]) == ("running", 20, 40, 100)
    assert status["step_seconds"] == 5.0 and status["phases"][0][0]["name"] == "generate"
    assert get(f"{url}/api/runs")[0]["state"] == "running"
    health = get(f"{url}/api/health?run=run")
    assert [curve["title"] for curve in health["curves"]] == ["Reward", "Validation", "Entropy", "Response length"]
    assert health["findings"] == []
    write_status(run, state="failed", reason="<script>alert(1)</script>")
    (failed,) = get(f"{url}/api/health?run=run")["findings"]
    assert failed["rule"] == "run_failed" and "<script>" in failed["text"]


def test_three_planted_faults(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    plant(
        run,
        critic__score__mean=0.995,
        response_length__clip_ratio=0.4,
        tool_call_counts__mean=3.0,
        tool_error_counts__mean=1.0,
    )
    found = get(f"{serve(tmp_path)}/api/health?run=run")["findings"]
    assert [(each["rule"], each["severity"]) for each in found] == [
        ("responses_cut", "bad"),
        ("tools_fail", "bad"),
        ("reward_saturated", "warning"),
    ]
    assert found[0]["rollouts"] == {"stop": "length"} and found[1]["title"] == "33 % of the tool calls fail"


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\x00garbage", b"[1, 2", b'{"state": 3, "phases": {"a": 1}, "step_seconds": "x"}', b"[" * 9999],
)
def test_damaged_files_are_answers(serve: Serve, tmp_path: Path, content: bytes) -> None:
    run = make_run(tmp_path / "run", steps=3)
    for name in ("status.json", "plan.json", "config.yaml"):
        (run / name).write_bytes(content)
    url = serve(tmp_path)
    assert get(f"{url}/api/status?run=run")["state"] == "unknown"
    assert get(f"{url}/api/health?run=run")["findings"] == []
    assert get(f"{url}/api/runs")[0]["state"] == "unknown"


def test_a_long_run_has_short_curves(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    plant(run, steps=1001)
    reward = get(f"{serve(tmp_path)}/api/health?run=run")["curves"][0]
    assert len(reward["step"]) <= 200 and reward["step"][-1] == 1001
    assert reward["value"][-1] == pytest.approx(0.9, abs=0.1)


def test_events_tell_of_a_new_status(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    write_status(run)
    with urllib.request.urlopen(f"{serve(tmp_path)}/api/events", timeout=30) as events:
        lines = []
        while sum(line.startswith(b"event: status") for line in lines) < 2:
            lines.append(events.readline())
            if lines[-1].startswith(b"event: status"):
                write_status(run, state="finished")
        last = events.readline()
    assert b'data: {"run":"run","step":2}\n' in lines
    assert json.loads(last.removeprefix(b"data: ")) == {"run": "run", "state": "finished"}


def test_events_tell_of_a_run_that_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_status(make_run(tmp_path / "run", steps=2))
    app = DashboardApp(Runs([tmp_path]))
    first = app._last_look = app._look()
    assert not list(_events_of("run", first["run"], app._look()["run"]))
    later = SimpleNamespace(time=lambda: time.time() + 61)
    monkeypatch.setattr(health_view, "time", later)
    silent = app._last_look = app._look()
    event = b'event: status\ndata: {"run":"run","state":"%s"}\n\n'
    assert list(_events_of("run", first["run"], silent["run"])) == [event % b"silent"]
    monkeypatch.setattr(health_view, "is_alive", lambda status: False)
    assert list(_events_of("run", silent["run"], app._look()["run"])) == [event % b"killed"]


def test_pages_of_the_docs(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=2)
    url = serve(tmp_path)
    with urllib.request.urlopen(f"{url}/docs/metrics.md") as response:
        assert response.headers["content-type"].startswith("text/plain") and b"What to watch" in response.read()
    assert get(f"{url}/api/health?run=run")["docs"] is True
    for path in ("nothing.md", "x" * 256 + ".md", "..%2Fpyproject.toml", "%2e%2e", "assets"):
        assert status_of(f"{url}/docs/{path}") == 404


def test_docs_that_are_not_installed(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", steps=2)
    monkeypatch.setattr(health_api, "DOCS", tmp_path / "docs")
    assert get(f"{serve(tmp_path)}/api/health?run=run")["docs"] is False


def test_processes_that_exist() -> None:
    here = {"host": socket.gethostname()}
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert is_alive(here | {"pid": os.getpid()}) is True and is_alive(here | {"pid": gone.pid}) is False
    for unknown in (None, {}, here, here | {"pid": "x"}, here | {"pid": -1}, {"host": "elsewhere", "pid": gone.pid}):
        assert is_alive(unknown) is None


def test_no_torch_is_loaded() -> None:
    code = "import lockstep.observability.dashboard.app, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (390, True)])
def test_findings_on_the_page(serve: Serve, open_page: OpenPage, tmp_path: Path, width: int, dark: bool) -> None:
    run = make_run(tmp_path / "run")
    plant(run, response_length__clip_ratio=0.4)
    write_status(run, state="failed", reason="<img src=x onerror=alert(1)> " + "long " * 300)
    page = open_page(f"{serve(tmp_path)}/#/health?run=run", width, dark)
    page.wait_for_selector(".small-chart.js-plotly-plot")
    titles = page.locator(".finding h3").all_inner_texts()
    assert titles == ["Problem The run has failed", "Problem 40 % of the responses are cut"]
    assert "<img src=x" in page.inner_text(".finding") and page.locator(".finding img").count() == 0
    assert page.inner_text("#run option") == "run (failed)"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("link", name="response_length/clip_ratio").click()
    page.wait_for_selector("#curves")
    assert "metric=response_length%2Fclip_ratio" in page.url
    page.go_back()
    page.wait_for_selector(".finding")


@pytest.mark.slow
def test_the_page_follows_the_status(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_status(run)
    page = open_page(f"{serve(tmp_path)}/#/health?run=run")
    page.wait_for_selector(".phases progress")
    assert page.get_by_label("generate: 5 of 16 sequences").count() == 1
    write_status(run, phases=[], seconds_left=7.0)
    page.get_by_text("about 7.0 s").wait_for()


@pytest.mark.slow
def test_beside_a_run_that_trains(open_page: OpenPage, tmp_path: Path) -> None:
    """`trainer.dashboard=true` on a tiny model: the page follows phases and steps until the run ends, and goes with it."""
    from tests.tiny import save_tiny_model, write_rows

    save_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "train.parquet", 8)
    command = [sys.executable, "-m", "lockstep.cli", "grpo", f"actor_rollout_ref.model.path={tmp_path}/model"]
    command += [f"data.train_files={tmp_path}/train.parquet", "trainer.device=cpu", "data.train_batch_size=4"]
    command += [
        "data.max_prompt_length=40",
        "data.max_response_length=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    command += [
        "trainer.total_training_steps=400",
        "trainer.total_epochs=400",
        "trainer.save_freq=0",
        "trainer.test_freq=-1",
    ]
    command += ["trainer.dashboard=true", "trainer.dashboard_port=0", f"trainer.default_local_dir={tmp_path}/run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path) as run:
        try:
            assert run.stdout is not None
            url = ""
            log = []
            for line in run.stdout:
                log.append(line)
                if "dashboard at " in line:
                    url = line.split("dashboard at ")[1].split()[0]
                    break
            assert url, "".join(log[-20:])
            page = open_page(url)
            page.wait_for_selector(".state.running", timeout=60_000)
            page.wait_for_selector(".small-chart.js-plotly-plot", timeout=60_000)
            step = page.locator(".fact", has_text="Step").first.locator("dd")
            first = step.inner_text()
            while step.inner_text() == first:
                page.wait_for_timeout(100)
            page.wait_for_selector(".phases .phase", timeout=60_000)
            # An untrained model: its responses are cut. Said after three steps, so other findings may come first.
            page.locator(".finding", has_text="of the responses are cut").wait_for(timeout=60_000)
            page.goto("about:blank")
        finally:
            run.terminate()
            for _ in run.stdout or ():
                pass
            run.wait(60)
    with pytest.raises(OSError):
        get(f"{url}api/runs")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"
