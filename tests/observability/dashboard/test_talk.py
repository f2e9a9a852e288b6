"""Talk: a checkpoint is served as a child process, by a small model; who may start it, and how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.observability.dashboard import talk_server
from lockstep.observability.dashboard.talk_server import TalkServer, chat_request, refuse_short_memory
from tests.observability.dashboard.conftest import OpenPage, Serve
from tests.observability.dashboard.made_runs import make_run
from tests.observability.dashboard.test_app import get
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.first

HI = [{"role": "user", "content": "1+1?"}]


def post(url: str, body: Any, **headers: str) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | headers
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
        return response.read() if "chat" in url else json.loads(response.read())


def refusal(url: str, body: Any, **headers: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, body, **headers)
    return caught.value.code, caught.value.read().decode()


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two checkpoints of a tiny model, and one that has no model."""
    run = make_run(tmp_path_factory.mktemp("talk") / "run", steps=2)
    for step in (9, 10):
        save_tiny_model(run / f"global_step_{step}" / "actor" / "huggingface")
    (run / "global_step_1" / "actor" / "shards").mkdir(parents=True)
    return run


@pytest.fixture
def talk() -> Iterator[TalkServer]:
    server = TalkServer()
    yield server
    server.stop()


def wait_for(url: str, state: str) -> Any:
    for _ in range(1200):
        server = get(f"{url}/api/talk?run=run")["server"]
        if server["state"] != "loading":
            break
        time.sleep(0.1)
    assert server["state"] == state, server
    return server


def test_checkpoints_newest_first(serve: Serve, run: Path) -> None:
    data = get(f"{serve(run.parent)}/api/talk?run=run")
    assert data["checkpoints"] == ["global_step_10", "global_step_9", "global_step_1"]
    assert data["server"] is None and data["training"] is False and data["device"] == "auto"


def test_a_run_that_trains_here_keeps_its_gpu(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    url = serve(tmp_path)
    status = {"state": "running", "host": os.uname().nodename, "pid": os.getpid()}
    for changed, training in (
        ({}, True),
        ({"state": "finished"}, False),
        ({"host": "?"}, False),
        ({"pid": None}, False),
    ):
        (run / "status.json").write_text(json.dumps(status | changed))
        data = get(f"{url}/api/talk?run=run")
        assert (data["training"], data["device"]) == ((True, "cpu") if training else (False, "auto"))
        assert data["checkpoints"] == []
    (run / "status.json").write_bytes(b"\xff[")
    assert get(f"{url}/api/talk?run=run")["training"] is False


def test_who_may_start_and_what(serve: Serve, run: Path) -> None:
    url = serve(run.parent)
    start = f"{url}/api/talk/start"
    good = {"run": "run", "checkpoint": "global_step_9", "device": "cpu"}
    assert refusal(start, good, Origin="http://evil.example")[0] == 403
    assert refusal(start, good, Host="evil.example")[0] == 403
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        code, words = refusal(start, good, **{"content-type": content_type})
        assert code == 403 and "application/json" in words
    assert refusal(start, b"{")[0] == 400
    assert refusal(start, b"[" * 100_000)[0] == 400
    assert refusal(start, [1])[0] == 400
    assert refusal(start, b" " * (5 << 20))[0] == 400
    assert refusal(start, {"run": "run"})[1] == '{"error":"the request lacks the parameter checkpoint"}'
    assert "has no checkpoint" in refusal(start, good | {"checkpoint": "../../etc"})[1]
    assert "must be one of cpu, auto" in refusal(start, good | {"device": "--host"})[1]
    assert "hf_model" in refusal(start, good | {"checkpoint": "global_step_1"})[1]
    assert "load one first" in refusal(f"{url}/api/talk/chat", {"messages": HI})[1]
    for path in ("start", "stop", "chat"):
        with pytest.raises(urllib.error.HTTPError, match="405"):
            get(f"{url}/api/talk/{path}")
    guarded = serve(run.parent, token="secret")
    assert refusal(f"{guarded}/api/talk/start", good)[0] == 403
    assert post(f"{guarded}/api/talk/stop?token=secret", {}) == {"server": None}


def test_short_memory_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_short_memory(run / "global_step_9")
    assert (talk_server.available_memory() or 1) > 0
    monkeypatch.setattr(talk_server, "available_memory", lambda: 1 << 29)
    with pytest.raises(
        ValueError, match=r"global_step_9 needs about 1\.\d GiB of memory, and this machine has 0\.5 GiB left"
    ):
        refuse_short_memory(run / "global_step_9")


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_memory_left_by_cgroups(tmp_path: Path) -> None:
    assert talk_server.available_memory(tmp_path) is None
    write_files(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"})
    assert talk_server.available_memory(tmp_path) == 8000 << 10
    job = "sys/fs/cgroup/slurm/job"
    second = {
        "proc/self/cgroup": "0::/slurm/job/step\n",
        f"{job}/step/memory.max": "max\n",
        f"{job}/step/memory.current": "10\n",
        f"{job}/step/memory.stat": "inactive_file 5\n",
        f"{job}/memory.max": "4000\n",
        f"{job}/memory.current": "3000\n",
        f"{job}/memory.stat": "anon 1\ninactive_file 500\n",
        "sys/fs/cgroup/slurm/memory.max": "100000\n",  # of which the usage cannot be read
    }
    write_files(tmp_path, second)
    assert talk_server.available_memory(tmp_path) == 1500
    first = {
        "proc/self/cgroup": "7:cpu:/elsewhere\n6:hugetlb,memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",  # of the container: its own path is not mounted inside
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
    }
    write_files(tmp_path, first)
    assert talk_server.available_memory(tmp_path) == 600


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"messages": []}, "messages: must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages: each needs a role"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages: each needs a role"),
        ({"messages": [3]}, "messages: each needs a role"),
        ({"temperature": "1"}, "temperature: must be a number from 0 to 5"),
        ({"temperature": float("nan")}, "temperature: must be a number from 0 to 5"),
        ({"top_p": 0}, "top_p: must be a number from 0.001 to 1"),
        ({"max_tokens": 10**9}, "max_tokens: must be a number from 1 to 32768"),
        ({"max_tokens": True}, "max_tokens: must be a number"),
    ],
)
def test_chat_requests(changed: dict[str, Any], words: str) -> None:
    assert chat_request({"messages": HI, "top_p": 0.5})["top_p"] == 0.5
    with pytest.raises(ValueError, match=words):
        chat_request({"messages": HI} | changed)


def test_the_served_process_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, time\nprint(os.getpid(), os.nice(0), flush=True)\ntime.sleep(600)\n")
    program = (
        "import subprocess, sys, time\n"
        "from lockstep.utils.child_process import start_module\n"
        "child = start_module('lockstep.utils.tied_process', 'waits', stdin=subprocess.PIPE)\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        try:
            pid, niceness = map(int, output.readline().split())
            assert niceness == min(19, os.nice(0) + 10)
        finally:
            parent.kill()
            parent.wait()
        assert output.read() == ""  # ends when the child, which holds it too, has ended
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_serve_chat_switch_and_stop(serve: Serve, run: Path) -> None:
    before = snapshot(run)
    url = serve(run.parent)
    post(f"{url}/api/talk/start", {"run": "run", "checkpoint": "global_step_9", "device": "cpu"})
    wait_for(url, "ready")
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in post(f"{url}/api/talk/chat", {"messages": HI, "max_tokens": 12}).split(b"\n\n")
        if line
    ]
    assert all(set(event) <= {"text", "end"} for event in events) and events[-1]["end"] in ("stop", "length")
    long = {"role": "user", "content": "1" * 100_000}
    (answer,) = post(f"{url}/api/talk/chat", {"messages": [long]}).split(b"\n\n")[:-1]
    assert "error" in json.loads(answer.removeprefix(b"data: "))
    served = [pid for pid in os.listdir("/proc") if pid.isdigit() and _serves(int(pid))]
    assert len(served) == 1
    post(f"{url}/api/talk/start", {"run": "run", "checkpoint": "global_step_10", "device": "cpu"})
    assert wait_for(url, "ready")["checkpoint"] == "global_step_10"
    (now,) = [pid for pid in os.listdir("/proc") if pid.isdigit() and _serves(int(pid))]
    assert now != served[0]
    assert post(f"{url}/api/talk/stop", {}) == {"server": None}
    assert get(f"{url}/api/talk?run=run")["server"] is None
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _serves(int(pid))]
    assert snapshot(run) == before


def _serves(pid: int) -> bool:
    """Whether it is a server that this test's dashboard has started."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return False
    return b"serve" in words and parent == os.getpid()


@pytest.mark.slow
def test_failure_shows_the_last_lines(serve: Serve, run: Path) -> None:
    damaged = run / "global_step_11" / "actor" / "huggingface"
    save_tiny_model(damaged)
    (damaged / "config.json").write_text("{}")
    url = serve(run.parent)
    try:
        post(f"{url}/api/talk/start", {"run": "run", "checkpoint": "global_step_11", "device": "cpu"})
        server = wait_for(url, "failed")
        assert server["problem"].startswith("the server exited with code") and server["log"]
    finally:
        shutil.rmtree(run / "global_step_11")


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_the_server_ends_with_the_dashboard(run: Path, signal_number: signal.Signals) -> None:
    command = [sys.executable, "-m", "lockstep.cli", "dashboard", str(run), "--port", "0"]
    dashboard = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert dashboard.stdout is not None
        url = dashboard.stdout.readline().split()[2].rstrip("/")
        post(f"{url}/api/talk/start", {"run": "run", "checkpoint": "global_step_9", "device": "cpu"})
        wait_for(url, "ready")
        children = Path(f"/proc/{dashboard.pid}/task/{dashboard.pid}/children").read_text().split()
        children += [
            c for t in Path(f"/proc/{dashboard.pid}/task").iterdir() for c in (t / "children").read_text().split()
        ]
        (child,) = set(children)
        dashboard.send_signal(signal_number)
        dashboard.wait(60)
        for _ in range(300):
            if not Path(f"/proc/{child}").exists() or "(zombie)" in Path(f"/proc/{child}/status").read_text():
                break
            time.sleep(0.1)
        else:
            pytest.fail("the served process is still there")
    finally:
        dashboard.kill()
        dashboard.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(380, True), (1600, False)])
def test_the_panel(serve: Serve, open_page: OpenPage, run: Path, width: int, dark: bool) -> None:
    url = serve(run.parent)
    page = open_page(f"{url}/#/talk?run=run", width, dark)
    page.get_by_text("Nothing is loaded.").wait_for()
    assert page.get_by_role("button", name="Send").is_disabled()
    page.get_by_label("Device").select_option("cpu")
    page.get_by_role("button", name="Load", exact=True).click()
    page.get_by_text("Loading global_step_10").wait_for()
    page.get_by_text("global_step_10 of run is loaded (CPU)").wait_for(timeout=120_000)
    page.get_by_label("Message", exact=True).fill("1+1? <img src=x onerror=alert(1)>")
    for name, value, words in (
        ("Max tokens", "0", "Max tokens must be a whole number from 1 to 32768."),
        ("Max tokens", "", "Max tokens must be a whole number"),
        ("Temperature", "-1", "Temperature must be a number from 0 to 5."),
    ):
        before = page.get_by_label(name).input_value()
        page.get_by_label(name).fill(value)
        page.get_by_role("button", name="Send").click()
        page.get_by_role("alert").filter(has_text=words).wait_for()
        page.get_by_label(name).fill(before)
    assert page.locator(".answer").count() == 0
    page.get_by_label("Max tokens").fill("20")
    page.get_by_label("Message", exact=True).press("Enter")
    page.locator(".answer .words").wait_for()
    page.locator("button:has-text('Ask again'):not([disabled])").wait_for()
    assert re.match("stop: the model ended|length: cut at the limit", page.locator(".answer p").inner_text())
    page.get_by_role("button", name="Ask again").click()
    page.locator("button:has-text('Ask again'):not([disabled])").wait_for()
    assert page.locator(".answer").count() == 2
    assert "<img" in page.locator(".question .words").inner_text() and page.locator("#talk img").count() == 0
    # a long answer is stopped
    page.get_by_label("Max tokens").fill("400")
    page.get_by_label("Temperature").fill("5")
    page.get_by_label("Message", exact=True).fill("again")
    page.get_by_label("Message", exact=True).press("Enter")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.locator(".answer").nth(2).get_by_text("stopped").wait_for()
    # the conversation stays while other panels are shown
    page.get_by_role("link", name="Curves").click()
    page.get_by_role("link", name="Talk").click()
    page.locator(".answer").nth(2).wait_for()
    assert page.get_by_label("Max tokens").input_value() == "400"
    assert page.get_by_label("Temperature").input_value() == "5"
    assert page.get_by_text("Tools and environments are not run here").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".answer").count() == 0
    page.get_by_role("button", name="Unload").click()
    page.get_by_text("Nothing is loaded.").wait_for()


@pytest.mark.slow
def test_the_panel_of_a_run_without_checkpoints(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    page = open_page(f"{serve(tmp_path)}/#/talk?run=run")
    page.get_by_text("This run has no checkpoint yet").wait_for()
