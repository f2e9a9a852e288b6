"""Time and memory: one step out of a large timeline, phases over the run, memory beside the plan; the panel in a browser."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lockstep.observability.dashboard import timeline_reader
from lockstep.observability.dashboard.timeline_reader import read_step
from lockstep.observability.jsonl import json_line
from lockstep.observability.timeline import TimelineFile, read_steps
from lockstep.utils.spans import Span
from tests.observability.dashboard.conftest import OpenPage, Serve
from tests.observability.dashboard.made_runs import make_run, timeline_line
from tests.observability.dashboard.test_app import get, status_of


def message_of(url: str) -> str:
    """The words of an answer that is an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url)
    return str(json.loads(caught.value.read())["error"])


def test_every_step_is_found_as_a_whole_read_finds_it(tmp_path: Path) -> None:
    """Lines of very different lengths, gaps, steps of two lines, and lines that cannot be read."""
    with open(tmp_path / "timeline.jsonl", "wb") as file:
        for step in range(0, 300, 3):
            begin = 1_700_000_000_000_000 + step * 1_000_000
            spans = [["step", "controller", 0, 0, 900_000]]
            spans += [["gen", "actor", rank, 10, 1000 + rank] for rank in range(step % 200)]
            file.write(json.dumps({"step": step, "begin_us": begin, "spans": spans}).encode() + b"\n")
            if step % 5 == 0:
                late = [["save_checkpoint", "controller", 0, 0, 5000]]
                file.write(json.dumps({"step": step, "begin_us": begin + 950_000, "spans": late}).encode() + b"\n")
            if step % 7 == 0:
                file.write(b"\xff\x00 garbage " * step + b"\n")
        file.write(b'{"step": 300, "begin_us": 17')
    lines = (tmp_path / "timeline.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean" / "timeline.jsonl").write_bytes(b"".join(line for line in lines[:-1] if line[:1] == b"{"))
    expected = read_steps(tmp_path / "clean")
    for step, spans in expected.items():
        found = read_step(tmp_path, step)
        assert found.spans == spans
        assert (found.previous, found.following) == (step - 3 if step else None, step + 3 if step < 297 else None)
    assert read_step(tmp_path).step == read_step(tmp_path, 0).last == 297
    with pytest.raises(ValueError, match="no spans of step 4; the nearest steps are 3 and 6"):
        read_step(tmp_path, 4)
    with pytest.raises(ValueError, match="no spans of step 1000; the nearest steps are 297"):
        read_step(tmp_path, 1000)


def test_only_a_small_part_of_a_large_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "timeline.jsonl", "wb") as file:
        for step in range(1, 30_001):
            file.write(timeline_line(step))
    size = (tmp_path / "timeline.jsonl").stat().st_size
    read = 0

    class Counting:
        """A file that counts what is read."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> "Counting":
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: int) -> Any:
                nonlocal read
                got = getattr(self._file, name)(*arguments)
                read += len(got) if isinstance(got, bytes) else 0
                return got

            return call

    monkeypatch.setattr(timeline_reader, "open", lambda *arguments: Counting(open(*arguments)), raising=False)  # noqa: SIM115
    for step in (1, 12_345, 30_000):
        assert read_step(tmp_path, step).step == step
    assert read < size / 10


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff" * 5000,
        b"\n" * 1000,
        b'{"step": 1, "begin_us": 0, "spans": []}\n',
        b'{"step": 1, "begin_us": "x", "spans": 3}\n',
        b'{"step": 1, "begin_us": 0, "spans": [["a", "b"]]}\n',
        b'{"step": 1, "begin_us": 0, "spans": [[1, null, "x", 0, 1]]}\n',
        b'{"step": 1, "begin_us": 0, "spans": ' + b"[" * 100_000 + b"\n",
        b'{"step": 1, "begin_us": 0, "spans": [["gen", "controller", 0, 0, 1',
    ],
)
def test_damaged_timeline_is_told(serve: Serve, tmp_path: Path, content: bytes) -> None:
    run = make_run(tmp_path / "run", steps=2)
    (run / "timeline.jsonl").write_bytes(content)
    assert "timeline.jsonl has no" in message_of(f"{serve(tmp_path)}/api/timeline?run=run")


def test_timeline_of_a_step(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=3)
    url = serve(tmp_path)
    data = get(f"{url}/api/timeline?run=run&step=2")
    assert (data["step"], data["previous"], data["next"], data["last"], data["num_rows"]) == (2, 1, 3, 3, 3)
    assert data["tracks"][0] == {"role": "controller", "rank": 0, "lanes": 2}
    assert [2, "gen", 0, 1, 0, 4_000_000] in data["spans"]
    (call,) = [call for call in data["calls"] if call["name"] == "generate_sequences"]
    assert call["ranks"] == 2 and call["mean"] == pytest.approx(3.9)
    assert get(f"{url}/api/timeline?run=run")["step"] == 3
    only = get(f"{url}/api/timeline?run=run&ranks=1")
    assert [(track["role"], track["rank"]) for track in only["tracks"]] == [("controller", 0), ("actor_rollout", 1)]
    assert message_of(f"{url}/api/timeline?run=run&ranks=x").startswith("ranks x: expected numbers")
    assert message_of(f"{url}/api/timeline?run=run&step=-1") == "step=-1: must be 0 to 9007199254740992"
    (tmp_path / "run" / "timeline.jsonl").unlink()
    assert message_of(f"{url}/api/timeline?run=run") == "this run has written no timeline.jsonl yet"


def test_many_ranks_are_bounded(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    (run / "timeline.jsonl").unlink()
    file = TimelineFile(run, 0)
    spans = [Span("step", "controller", 0, 0, 2_000_000)]
    spans += [
        Span(name, role, rank, 10, 1_000_000 + rank * 100)
        for role, name in (("actor", "update_actor"), ("critic", "update_critic"))
        for rank in range(1024)
    ]
    spans += [Span("tick", "critic", 0, each, each + 1) for each in range(5000)]
    file.append(1, spans)
    file.close()
    url = serve(tmp_path)
    data = get(f"{url}/api/timeline?run=run")
    assert (len(data["tracks"]), data["num_rows"]) == (64, 2049)
    assert len(data["spans"]) == 4000 and data["spans_left_out"] == 64 + 5000 - 4000
    assert {span[1] for span in data["spans"]} == {"step", "update_actor", "update_critic", "tick"}
    (call,) = [call for call in data["calls"] if call["name"] == "update_actor"]
    assert (call["ranks"], call["slowest"], call["fastest"]) == (1024, 1023, 0)
    some = get(f"{url}/api/timeline?run=run&ranks=1000-1003,0-999999999999")
    assert len(some["tracks"]) == 64
    assert len(get(f"{url}/api/timeline?run=run&ranks=1000-1003")["tracks"]) == 9


def test_phases_over_the_run(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    rows = [
        {"timing_s/step": 10.0, "timing_s/gen": 4.0, "timing_s/update_actor": 5.0, "timing_s/save_checkpoint": 3.0}
        | ({"timing_s/testing": 1.0} if step % 4 == 0 else {})
        | {"perf/throughput": float(step), "async/queue_length": 2.0}
        for step in range(1, 9)
    ]
    (run / "metrics.jsonl").write_bytes(b"".join(json_line({"step": i, **row}) for i, row in enumerate(rows, start=1)))
    data = get(f"{serve(tmp_path)}/api/time?run=run")
    assert data["step"] == list(range(1, 9)) and data["steps_per_point"] == 1
    seconds = {phase["name"]: phase["seconds"] for phase in data["phases"]}
    assert list(seconds) == ["update_actor", "gen", "save_checkpoint", "testing", "other"]
    assert seconds["testing"] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert seconds["other"] == [1, 1, 1, 0, 1, 1, 1, 0]  # saving is not part of the step
    assert data["throughput"]["value"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(each["name"], each["value"]) for each in data["async"]] == [("async/queue_length", [2.0] * 8)]


def test_validation_is_after_the_step_of_supervised_training(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    rows = [{"timing_s/step": 2.0} | ({"timing_s/testing": 1.5} if step == 2 else {}) for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_bytes(b"".join(json_line({"step": i, **row}) for i, row in enumerate(rows, start=1)))
    phases = get(f"{serve(tmp_path)}/api/time?run=run")["phases"]
    assert {phase["name"]: phase["seconds"] for phase in phases} == {"testing": [0, 1.5, 0], "other": [2, 2, 2]}


def test_a_long_run_has_a_bounded_number_of_points(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    with open(run / "metrics.jsonl", "wb") as file:
        for step in range(1, 1001):
            odd = float("nan") if step == 7 else 1.0 + step % 2
            file.write(json_line({"step": step, "timing_s/step": 2.0, "timing_s/gen": odd, "perf/throughput": odd}))
    data = get(f"{serve(tmp_path)}/api/time?run=run")
    assert len(data["step"]) == 334 and data["steps_per_point"] == 3 and data["step"][-1] == 1000
    means = [(1 + i % 2 + 1 + (i + 1) % 2 + 1 + (i + 2) % 2) / 3 for i in range(1, 999, 3)]
    means[2] = (1 + 2) / 3  # steps 7 to 9, of which 7 has no number
    assert data["phases"][0]["seconds"][:333] == pytest.approx(means, rel=1e-4)


def test_memory_beside_the_plan(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    url = serve(tmp_path)
    assert get(f"{url}/api/memory?run=run")["memory"] == []
    gib = [{"gen": 10.0, "update_actor": 30.0}, {"gen": 12.0, "update_actor": 28.0}]
    rows = [
        {f"perf/max_memory_allocated_gb/{phase}": value for phase, value in step.items()}
        | {"perf/memory_used_gb/gen": 40.0 + i, "perf/max_memory_allocated_gb": 30.0, "timing_s/gen": 4.0 + 2 * i}
        for i, step in enumerate(gib)
    ]
    (run / "metrics.jsonl").write_bytes(b"".join(json_line({"step": i, **row}) for i, row in enumerate(rows, start=1)))
    plan = {
        "gpu": "H100",
        "gpu_memory_gb": 80.0,
        "memory_gb": {"generate": 2**30 / 1e9 * 16, "update actor": 2**30 / 1e9 * 24},
        "seconds": {"generate": 2.5, "update actor": 9},
        "step_seconds": 12.0,
    }
    (run / "plan.json").write_text(json.dumps(plan))
    data = get(f"{url}/api/memory?run=run")
    assert data["memory"] == [
        {"phase": "gen", "planned": 16.0, "peak": 12.0, "last": 12.0, "used": 41.0},
        {"phase": "update_actor", "planned": 24.0, "peak": 30.0, "last": 28.0, "used": None},
    ]
    assert data["gpu_memory_gib"] == pytest.approx(80e9 / 2**30, rel=1e-4)
    assert data["since_start"] == {"perf/max_memory_allocated_gb": 30.0}
    assert data["seconds"] == [
        {"phase": "gen", "planned": 2.5, "median": 5.0},
        {"phase": "step", "planned": 12.0, "median": None},
        {"phase": "update_actor", "planned": 9, "median": None},
    ]


@pytest.mark.parametrize("content", ["", "[1]", "[" * 100_000, '{"memory_gb": 3, "seconds": {"gen": "x"}, "gpu": []}'])
def test_damaged_plan(serve: Serve, tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run", steps=2)
    (run / "plan.json").write_text(content)
    data = get(f"{serve(tmp_path)}/api/memory?run=run")
    assert data["memory"] == [] and (data["plan_problem"] or "").startswith("" if content[:1] == "{" else "plan.json ")


def asynchronous_run(folder: Path, steps: int = 30) -> Path:
    """With the metrics of a GPU and of asynchronous training, and a plan."""
    run = make_run(folder, steps=1)
    with open(run / "metrics.jsonl", "wb") as metrics, open(run / "timeline.jsonl", "wb") as timeline:
        for step in range(1, steps + 1):
            metrics.write(json_line({"step": step, "time": 1.7e9 + 10 * step} | gpu_metrics(step)))
            timeline.write(timeline_line(step))
    plan = {"gpu": "H100", "gpu_memory_gb": 80, "memory_gb": {"generate": 60.0, "update actor": 50.0}}
    (run / "plan.json").write_text(json.dumps(plan | {"seconds": {"generate": 3.0, "update actor": 6.0}}))
    return run


def gpu_metrics(step: int) -> dict[str, float]:
    return {
        "timing_s/step": 10.0,
        "timing_s/gen": 4.0,
        "timing_s/update_actor": 5.0 + step % 3 / 5,
        "perf/throughput": 900.0 + 20 * (step % 5),
        "async/staleness/mean": 0.5,
        "async/queue_length": float(step % 4),
        "async/trainer_wait_share": 0.1,
        "perf/max_memory_allocated_gb/gen": 55.0,
        "perf/max_memory_allocated_gb/update_actor": 47.0,
        "perf/memory_used_gb/gen": 62.0,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(380, True), (1600, False)])
def test_the_panel(serve: Serve, open_page: OpenPage, tmp_path: Path, width: int, dark: bool) -> None:
    run = asynchronous_run(tmp_path / "<b>run</b>")
    url = serve(tmp_path)
    page = open_page(f"{url}/#/time", width, dark, refused=True)
    page.wait_for_selector(".timeline[data-step='30'] .span")
    page.wait_for_selector("#time .chart .main-svg")
    assert page.locator("#time .grid section").count() == 3
    assert "62" in page.locator("#time table").nth(1).inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # by keyboard: spans, and their words
    page.locator(".timeline").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.locator(".timeline .selected").inner_text().startswith("gen")
    assert page.get_by_role("status").filter(has_text="gen: 4.00 s").count() == 1
    page.keyboard.press("ArrowDown")
    assert page.get_by_role("status").filter(has_text="actor_rollout rank 0").count() == 1
    # an earlier step; the address keeps it
    page.get_by_role("button", name="Earlier").click()
    page.wait_for_selector(".timeline[data-step='29']")
    assert "step=29" in page.url and not page.get_by_label("Follow the newest").is_checked()
    page.get_by_label("Step", exact=True).fill("400")
    page.get_by_label("Step", exact=True).press("Enter")
    page.get_by_role("alert").filter(has_text="no spans of step 400").wait_for()
    # live: a step is added while the page follows
    page.get_by_label("Follow the newest").check()
    page.wait_for_selector(".timeline[data-step='30']")
    with open(run / "timeline.jsonl", "ab") as timeline, open(run / "metrics.jsonl", "ab") as metrics:
        timeline.write(timeline_line(31))
        metrics.write(json_line({"step": 31} | gpu_metrics(31)))
    page.wait_for_selector(".timeline[data-step='31']")
    page.get_by_label("Unit").select_option("seconds")
    assert "unit=seconds" in page.url


@pytest.mark.slow
def test_the_panel_of_a_run_on_cpu_and_of_a_damaged_one(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    make_run(tmp_path / "good", steps=3)
    bad = make_run(tmp_path / "worse", steps=3)
    (bad / "timeline.jsonl").write_bytes(b"\x00" * 5000)
    (bad / "metrics.jsonl").write_bytes(b"\xff" * 5000)
    url = serve(tmp_path)
    page = open_page(f"{url}/#/time?run=good", refused=True)
    page.get_by_text("This run reports no GPU memory").wait_for()
    page.get_by_text("This run has no plan.json").wait_for()
    plan = {
        "gpu": "cpu",
        "gpu_memory_gb": 25.0,
        "memory_gb": {"generate": 0.01},
        "seconds": {"generate": 0.009, "update actor": 4},
    }
    planned = make_run(tmp_path / "planned", steps=3)
    (planned / "plan.json").write_text(json.dumps(plan))
    (planned / "timeline.jsonl").write_text(
        json.dumps({"step": 3, "begin_us": 1, "spans": [["generate_sequences", "actor_rollout", 0, 0, 9]]}) + "\n"
    )
    page.goto(f"{url}/#/time?run=planned")
    page.get_by_text(
        "A run on CPU reports no memory, so only the plan is shown. Planned for the CPU with 23.3 GiB"
    ).wait_for()
    assert "gen\t4.0 s\t0.0 s\t–" in page.locator("#time table").last.inner_text()
    assert "update_actor\t5.0 s\t4.0 s\t125 %" in page.locator("#time table").last.inner_text()
    assert "of the GPU" not in page.locator("#time").inner_text()
    page.get_by_text("Calls of this step").click()
    assert page.get_by_role("columnheader", name="Fastest rank").count() == 0
    page.goto(f"{url}/#/time?run=gone")
    page.get_by_role("alert").first.wait_for()


@pytest.mark.slow
def test_the_panel_while_a_run_trains(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    command = [sys.executable, "-m", "lockstep.cli", "demo", "--out", str(demo), "--steps", "12", "--warmup-steps", "5"]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (demo / "timeline.jsonl").exists() and training.poll() is None:
            time.sleep(0.1)
        page = open_page(f"{serve(tmp_path)}/#/time", 1200, refused=True)  # the file may have no complete step yet
        page.wait_for_selector(".timeline .span", timeout=120_000)
        first = page.locator(".timeline").get_attribute("data-step")
        page.wait_for_function(
            "first => document.querySelector('.timeline').dataset.step !== first", arg=first, timeout=120_000
        )
        assert training.poll() in (None, 0)
    finally:
        training.kill()
        training.wait()


def test_status_codes(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    url = serve(tmp_path)
    assert status_of(f"{url}/api/time?run=other") == 404
    assert re.match("there is no run 'other'", message_of(f"{url}/api/memory?run=other"))
