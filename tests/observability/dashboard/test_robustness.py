"""The server as a whole: who has access, many and bad clients, bad run folders, how the command starts and ends."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lockstep import cli
from lockstep.observability.dashboard import main_dashboard, runs as runs_module
from lockstep.observability.dashboard.app import APIS, POSTS, STATIC, DashboardApp
from lockstep.observability.dashboard.metrics_store import MetricsStore
from lockstep.observability.dashboard.runs import Runs
from tests.observability.dashboard.conftest import OpenPage, Serve, served
from tests.observability.dashboard.made_runs import make_run
from tests.observability.dashboard.test_app import get, status_of


def answer(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; the path is sent as it is."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def connect(url: str, request: str = "") -> socket.socket:
    split = urlsplit(url)
    client = socket.create_connection((split.hostname, split.port), timeout=60)
    client.sendall(request.encode())
    return client


def listen(url: str) -> socket.socket:
    """A page's connection for events, of which one has come."""
    client = connect(url, f"GET /api/events HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n\r\n")
    received = b""
    while b"data: " not in received:
        received += client.recv(4096)
    return client


# Access


def test_paths_outside_are_not_served(serve: Serve, tmp_path: Path) -> None:
    url = serve(make_run(tmp_path / "run", steps=1))
    bad = ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "panels/../../app.py", "/etc/passwd", "%2fetc%2fpasswd", "%00"]
    for name in [*bad, "panels", "", "x" * 5000, "x" * 256 + ".js", "a%00.js", "%ff%fe.js", "no.js"]:
        assert answer(url, f"/static/{name}")[0] == 404, name
    assert answer(url, "/static/base.js")[0] == 200
    for name in ("../run", "/etc", "run/../run", "..", "%00", "x" * 5000):
        assert answer(url, f"/api/time?run={name}")[0] == 404


def test_an_unknown_run_is_named(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    url = serve(tmp_path)
    one = "run=nosuch&kind=train&step=1&row=0&key=0123456789abcdef&group=1&text=a&query=a&place=%5B%22output%22%5D&metric=a"
    several = "runs=%5B%22nosuch%22%5D&left=nosuch&right=nosuch"
    for path in APIS.keys() - {"/api/runs", "/api/talk"}:
        status, _, body = answer(url, f"{path}?{one}&{several}")
        assert (status, json.loads(body)) == (404, {"error": "there is no run 'nosuch' (any more)"}), path


def test_methods(serve: Serve, tmp_path: Path) -> None:
    url = serve(make_run(tmp_path / "run", steps=1))
    for path in ("/", "/static/base.js", "/api/runs", "/api/events", "/plotly.js"):
        status, headers, body = answer(url, path, "HEAD")
        assert (status, body) == (200, b"") and headers["x-content-type-options"] == "nosniff"
        for method in ("OPTIONS", "PUT", "DELETE", "POST"):
            status, headers, _ = answer(url, path, method, Origin="http://evil.example")
            assert status == 405 and "access-control-allow-origin" not in headers
    for path in POSTS:
        assert answer(url, path)[0] == 405


def test_answers_forbid_scripts_and_frames(serve: Serve, tmp_path: Path) -> None:
    url = serve(make_run(tmp_path / "run", steps=1))
    for path in ("/", "/static/app.js", "/api/runs", "/api/time?run=none"):
        headers = answer(url, path)[1]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "0x7f.1@evil.example", "localhost:1:2"])
def test_other_names_of_this_machine_are_refused(serve: Serve, tmp_path: Path, host: str) -> None:
    url = serve(make_run(tmp_path / "run", steps=1))
    for path in ("/", "/api/runs", "/static/base.js", "/api/events", "/plotly.js"):
        assert answer(url, path, Host=host)[0] in (400, 403)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1"])
def test_other_pages_are_refused(serve: Serve, tmp_path: Path, origin: str) -> None:
    url = serve(make_run(tmp_path / "run", steps=1))
    assert answer(url, "/api/runs", Origin=origin)[0] == 403
    assert answer(url, "/api/runs", Origin=url)[0] == 200


def test_token_and_cookie(serve: Serve, tmp_path: Path) -> None:
    url = serve(make_run(tmp_path / "run", steps=1), token="sec ret")
    for path in ("/", "/api/runs", "/static/base.js", "/plotly.js", "/api/events"):
        assert answer(url, path)[0] == answer(url, f"{path}?token=wrong")[0] == answer(url, f"{path}?token=")[0] == 403
    status, headers, _ = answer(url, "/?token=sec%20ret")
    assert status == 200
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    name, _, value = cookie.partition(";")[0].partition("=")
    assert str(urlsplit(url).port) in name  # a dashboard on another port keeps its own
    assert answer(url, "/api/runs", Cookie=f"{name}={value}")[0] == 200
    assert answer(url, "/api/runs", Cookie=f"{name}=x")[0] == 403
    assert answer(url, "/api/runs", Cookie=f"{name}={value}", Origin="http://evil.example")[0] == 403


@pytest.mark.slow
def test_the_token_leaves_the_address(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    url = serve(make_run(tmp_path / "run", steps=2), token="secret")
    page = open_page(f"{url}/?token=secret#/time?run=run")
    page.wait_for_selector(".timeline .span")
    assert "secret" not in page.url and page.url.endswith("#/time?run=run")
    page.reload()
    page.wait_for_selector(".timeline .span")
    page.get_by_text("connected", exact=True).wait_for()


# Many and bad clients


def test_many_requests_at_once(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=20)
    url = serve(tmp_path)
    paths = ["/api/runs", "/api/time?run=run", "/api/timeline?run=run", "/api/memory?run=run", "/static/base.js"] * 40
    with ThreadPoolExecutor(200) as pool:
        assert [status for status, _, _ in pool.map(lambda path: answer(url, path), paths)] == [200] * 200


def test_slow_clients_hold_up_nobody(serve: Serve, tmp_path: Path) -> None:
    url = serve(make_run(tmp_path / "run", steps=2))
    host = urlsplit(url).netloc
    slow = [connect(url, "GET / HTTP/1.1\r\nHost") for _ in range(20)]
    slow += [connect(url, f"GET /plotly.js HTTP/1.1\r\nHost: {host}\r\n\r\n") for _ in range(10)]  # and reads nothing
    head = (
        f"POST /api/talk/stop HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    )
    slow += [connect(url, head + "{") for _ in range(20)]
    assert get(f"{url}/api/runs")[0]["step"] == 2
    for client in slow:
        client.close()
    assert get(f"{url}/api/runs")


def test_pages_that_vanish_are_forgotten(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=2)
    app = DashboardApp(Runs([tmp_path]))
    with served(app) as url:
        pages = [listen(url) for _ in range(30)]
        assert app.num_listening == 30
        for page in pages:
            page.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))  # no goodbye
            page.close()
        for _ in range(600):
            if app.num_listening == 0:
                break
            time.sleep(0.05)
        assert app.num_listening == 0
        assert get(f"{url}/api/runs")


def test_a_step_is_told_to_every_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    with served(DashboardApp(Runs([tmp_path]))) as url:
        pages = [listen(url) for _ in range(3)]
        with open(run / "metrics.jsonl", "ab") as metrics:
            metrics.write(b'{"step": 3, "x": 1}\n')
        for page in pages:
            page.settimeout(30)
            received = b""
            while b'"step":3' not in received:
                received += page.recv(4096) or pytest.fail(f"the connection was closed after {received!r}")
            page.close()


# Bad run folders


def damage(run: Path, content: bytes) -> None:
    for name in ("metrics.jsonl", "timeline.jsonl", "config.yaml", "status.json", "plan.json", "summary.json"):
        (run / name).write_bytes(content)
    for folder in ("rollouts", "validation"):
        for file in (run / folder).iterdir():
            file.write_bytes(content)


CONTENTS = {
    "empty": b"",
    "binary": bytes(range(256)) * 200,
    "half a line": b'{"step": 3, "critic/score/mean": 0.',
    "wrong types": b'{"step": "x", "critic/score/mean": []}\n[1]\n3\nnull\n{"step": 1e999}\n{"step": 2, "a": 1e999, "b": {}}\n',
    "deep": b'{"step": 1, "a": ' + b"[" * 50_000 + b"\n",
    "tags": b"!!python/object/apply:os.system ['touch owned']\n",
    "aliases": b"a: &a [x, x]\nb: &b [*a, *a]\nc: *b\n<<: *a\n",
    "one long line": b"x" * 200_000,
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_damaged_runs_are_answers(serve: Serve, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every path of the API, also those of panels that this file does not know."""
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "bad", steps=2)
    make_run(tmp_path / "runs" / "good", steps=2)
    damage(run, CONTENTS[kind])
    url = serve(tmp_path / "runs")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for path in APIS:
        for more in ("", "&metric=critic/score/mean", "&step=1", "&step=1&row=0", "&other=good&runs=bad,good"):
            status, _, body = answer(url, f"{path}?run=bad{more}")
            assert status in (200, 400, 404), (path, more, body[:500])
            json.loads(body)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert {each["name"] for each in get(f"{url}/api/runs")} == {"bad", "good"}


def test_numbers_that_no_float_can_hold(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    huge = 10**400
    status = {"state": "running", "time": huge, "pid": huge, "step": huge, "step_seconds": [huge], "started": huge}
    (run / "status.json").write_text(json.dumps(status))
    (run / "plan.json").write_text(json.dumps({"memory_gb": {"generate": huge}, "seconds": {"generate": huge}}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": huge, "a": 1.0, "b": huge}) + "\n")
    spans = [["step", "controller", 0, 0, 10], ["gen", "controller", 0, 0, huge], ["gen", "controller", huge, 0, 1]]
    (run / "timeline.jsonl").write_text(json.dumps({"step": 1, "begin_us": 1, "spans": spans}) + "\n")
    url = serve(tmp_path)
    assert [(each["name"], each["state"], each["step"]) for each in get(f"{url}/api/runs")] == [("run", "unknown", 1)]
    assert [call["name"] for call in get(f"{url}/api/timeline?run=run")["calls"]] == ["step"]
    for path in ("status", "health", "time", "memory"):
        assert get(f"{url}/api/{path}?run=run")
    for path in APIS:
        assert status_of(f"{url}{path}?run=run&metric=a&runs=%5B%22run%22%5D") in (200, 400, 404), path


def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad", "good"):
        make_run(tmp_path / name, steps=2)
    last = MetricsStore.last

    def failing(store: MetricsStore) -> Any:
        if store.file.parent.name == "bad":
            raise ZeroDivisionError("a defect")
        return last(store)

    monkeypatch.setattr(MetricsStore, "last", failing)
    url = serve(tmp_path)
    assert {each["name"]: each["step"] for each in get(f"{url}/api/runs")} == {"bad": 0, "good": 2}
    told = b""
    with connect(url, f"GET /api/events HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n\r\n") as client:
        while b'{"run":"good","step":2}' not in told:
            told += client.recv(4096)


def test_nothing_is_written_into_a_run(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    url = serve(tmp_path)
    for path in APIS:
        answer(url, f"{path}?run=run")
        answer(url, f"{path}?run=run&step=1")
    assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before


def test_a_cache_that_cannot_be_written(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    make_run(tmp_path / "run", steps=3)
    url = serve(tmp_path)
    for path in APIS:
        for more in ("", "&step=1", "&step=1&row=0&key=0123456789abcdef"):
            assert answer(url, f"{path}?run=run{more}")[0] in (200, 400, 404), (path, more)


def test_runs_come_change_and_go(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "SCAN_INTERVAL_S", 0.0)
    monkeypatch.setattr(runs_module, "SCANNED_SHARE", 1.0)
    url = serve(tmp_path)
    assert get(f"{url}/api/runs") == []
    run = make_run(tmp_path / "run", steps=2)
    wait_until(lambda: [each["step"] for each in get(f"{url}/api/runs")] == [2])
    shutil.rmtree(run)
    wait_until(lambda: get(f"{url}/api/runs") == [])
    for path in APIS:
        assert answer(url, f"{path}?run=run")[0] in (200, 400, 404)
    make_run(tmp_path / "run", steps=5)
    wait_until(lambda: [each["step"] for each in get(f"{url}/api/runs")] == [5])
    assert get(f"{url}/api/timeline?run=run")["last"] == 5


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        time.sleep(0.02)
    assert holds()


def test_odd_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "a" / "run", steps=1)
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "self").symlink_to("self")
    (tmp_path / "a" / "pipe").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe" / "metrics.jsonl")
    (tmp_path / "a" / "folder" / "metrics.jsonl").mkdir(parents=True)
    make_run(tmp_path / "b" / "run", steps=1)
    assert [run.name for run in Runs([tmp_path / "a"]).all()] == ["run"]
    assert [run.name for run in Runs([tmp_path / "a", tmp_path / "b"]).all()] == ["a/run", "b/run"]
    same = Runs([tmp_path / "a" / "run", tmp_path / "b" / "run"]).all()
    assert {run.folder.parent.name for run in same} == {"a", "b"}

    def denied(path: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    for name in ("scandir", "stat"):
        runs = Runs([tmp_path / "a"] if name == "scandir" else [tmp_path / "a" / "run"])
        with monkeypatch.context() as patched:
            patched.setattr(os, name, denied)
            assert runs.all() == []


def test_a_scan_looks_into_a_limited_number_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / "a" / "deep" / str(number)).mkdir(parents=True)
    for name in ("a/deep/0/run", "z"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
    assert [run.name for run in Runs([tmp_path]).all()] == ["a/deep/0/run", "z"]
    monkeypatch.setattr(runs_module, "MOST_FOLDERS", 10)
    looked_into: list[Any] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked_into.append(path) or scandir(path))
    assert [run.name for run in Runs([tmp_path]).all()] == ["z"]  # nearer ones first
    assert len(looked_into) <= 10


def test_of_many_runs_the_newest_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "MOST_RUNS", 5)
    for number in range(40):
        folder = tmp_path / f"{number:05}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n')
        os.utime(folder, (number, number if number != 3 else 10_000))
    assert [run.name for run in Runs([tmp_path]).all()] == ["00003", *(f"{number:05}" for number in range(36, 40))]


# The command


@contextmanager
def dashboard(*arguments: str, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "lockstep.cli", "dashboard", "--port", "0", *arguments]
    process = subprocess.Popen(command, text=True, **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def url_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("dashboard at "))
    return line.split()[2].partition("?")[0].rstrip("/")


def test_ctrl_c_with_open_pages_ends_at_once_and_quietly(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    with dashboard(str(tmp_path)) as process:
        url = url_of(process)
        pages = [listen(url) for _ in range(5)]
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out, error) == (0, "", "")
        for page in pages:
            page.close()


@pytest.mark.slow
def test_start_without_runs_and_without_a_reader(tmp_path: Path) -> None:
    """In an empty folder, with the reader of its output gone: it says so, goes on, and shows the run that begins."""
    with dashboard(cwd=tmp_path) as process:
        assert process.stdout is not None
        url = url_of(process)
        assert (
            process.stdout.readline() == f"no runs in {tmp_path}/checkpoints yet: the page shows them when they begin\n"
        )
        process.stdout.close()
        assert get(f"{url}/api/runs") == []
        make_run(tmp_path / "checkpoints" / "project" / "run", steps=2)
        wait_until(
            lambda: time.sleep(0.1) is None and [each["name"] for each in get(f"{url}/api/runs")] == ["project/run"]
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None and process.stderr.read() == ""
        process.stdout = None


def test_torch_is_not_loaded() -> None:
    program = (
        "import sys, lockstep.cli, lockstep.observability.dashboard.main_dashboard, lockstep.observability.dashboard.app\n"
        "print([name for name in ('torch', 'transformers', 'ray', 'datasets', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["dashboard", *arguments]) == 2
    return capsys.readouterr().err


def test_mistakes_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(main_dashboard.TOKEN_VARIABLE, raising=False)
    folder = str(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port (0 takes a free one)"
        assert told(capsys, folder, "--port", str(port)) == f"lockstep dashboard: {words}\n"
    assert "--port 70000: must be 0 to 65535" in told(capsys, folder, "--port", "70000")
    assert "--host no.such.host.invalid: " in told(capsys, folder, "--host", "no.such.host.invalid", "--token", "x")
    assert "--host 0.0.0.0 is not loopback: set --token, or the environment variable" in told(
        capsys, folder, "--host", "0.0.0.0"
    )
    assert "the token must be printable ASCII" in told(capsys, folder, "--token", "é")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("none", "loop"):
        assert f"{folder}/{name} does not exist" in told(capsys, f"{folder}/{name}")


def test_closed_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    main_dashboard._tell("nobody hears it")


def test_files_of_the_page_are_referenced(serve: Serve, tmp_path: Path) -> None:
    page = (STATIC / "index.html").read_text()
    for file in STATIC.rglob("*.js"):
        assert f'src="static/{file.relative_to(STATIC).as_posix()}"' in page
    assert status_of(f"{serve(tmp_path)}/static/style.css") == 200
