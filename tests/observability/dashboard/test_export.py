"""`lockstep dashboard RUN --export FILE`: one page that needs nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.observability.dashboard import export
from lockstep.observability.dashboard.api import timeline
from lockstep.observability.dashboard.app import APIS
from lockstep.observability.dashboard.request import Recorded, json_list
from lockstep.observability.dashboard.runs import Runs
from lockstep.observability.jsonl import json_line
from tests.observability.dashboard.made_runs import make_run

HOSTILE = '</script><script>document.title = "stolen"</script><!-- <script> ]]> \u2028 \udcff & " \' '


def make_hostile_run(folder: Path) -> Path:
    run = make_run(folder, steps=3)
    rows = [{"input": HOSTILE, "output": HOSTILE, "score": 1.0, HOSTILE: HOSTILE, "__proto__": {"a": 1}}]
    (run / "rollouts/3.jsonl").write_bytes(b"".join(map(json_line, rows)))
    with open(run / "metrics.jsonl", "ab") as metrics:
        metrics.write(json_line({"step": 3, f"val-core/{HOSTILE}/mean@1": 1.0}))
    return run


def recorded_in(page: Path) -> Any:
    return json.loads(
        re.search(r'<script id="recorded" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)[1]
    )


def test_an_exported_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_hostile_run(tmp_path / "a <b> & c")
    page = tmp_path / "report.html"
    assert cli.main(["dashboard", str(run), "--export", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {page} (")
    text = page.read_text()
    assert text.count("<script") == text.count("</script>") and "<script src" not in text
    assert "<!--" not in text and 'rel="stylesheet"' not in text
    assert "<title>Lockstep: a &lt;b&gt; &amp; c</title>" in text
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    answers = recorded_in(page)
    name = run.name
    assert [found["name"] for found in answers["/api/runs"]] == [name]
    curve = answers[Recorded("/api/curve", {"run": name, "metric": "critic/score/max"}).url]
    assert curve["value"] == [1.0, 1.0, 1.0]
    assert answers[Recorded("/api/dumps", {"run": name}).url]["train"]["steps"] == [1, 2, 3]
    group = answers[Recorded("/api/group", {"run": name, "kind": "train", "step": "3", "group": "1"}).url]
    assert "stolen" in group["prompt"]["text"]
    row = {"run": name, "kind": "train", "step": "3", "row": "0"}
    assert answers[Recorded("/api/conversation", row).url]["score"] == 1.0
    assert answers[Recorded("/api/timeline", {"run": name}).url]["step"] == 3
    assert 'panel({\n    id: "talk"' not in text  # it needs the server
    same = {"kind": "train", "left": name, "left_step": "1", "right": name}
    assert answers[Recorded("/api/compare/prompts", same).url]["right_step"] == 3


def test_steps_of_a_long_run_are_narrowed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=40, prompts=1, n=1)
    page = tmp_path / "report.html"
    assert cli.main(["dashboard", str(run), "--export", str(page)]) == 0
    answers = recorded_in(page)
    steps = answers["/api/dumps?run=a"]["train"]["steps"]
    assert len(steps) == 6 and steps[0] == 1 and steps[-1] == 40
    assert all(f"/api/rollouts?run=a&kind=train&step={step}" in answers for step in steps)


def test_several_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a", steps=2)
    make_run(tmp_path / "runs/b", steps=3)
    page = tmp_path / "report.html"
    assert cli.main(["dashboard", str(tmp_path / "runs"), "--export", str(page)]) == 0
    answers = recorded_in(page)
    pair = Recorded("/api/settings", {"runs": json_list(["b", "a"])}).url
    assert answers[pair]["rows"] == [{"key": "trainer.total_training_steps", "values": ["3", "2"]}]
    assert answers["/api/compare/prompts?kind=validation&left=a&right=b"]["summary"]["num_pairs"] == 4


def test_the_size_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a", steps=5)
    monkeypatch.setattr(export, "MOST_BYTES", 10_000)
    page = tmp_path / "report.html"
    assert cli.main(["dashboard", str(run), "--export", str(page)]) == 0
    assert "answers left out to keep it small" in capsys.readouterr().out
    answers = recorded_in(page)
    assert "/api/runs" in answers and len(json.dumps(answers)) < 15_000


def test_what_cannot_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs/a", steps=1)
    (tmp_path / "empty").mkdir()
    page = str(tmp_path / "report.html")
    assert cli.main(["dashboard", str(tmp_path / "empty"), "--export", page]) == 2
    assert cli.main(["dashboard", str(tmp_path / "none"), "--export", page]) == 2
    assert cli.main(["dashboard", str(run), "--export", str(tmp_path / "none/report.html")]) == 2
    assert cli.main(["dashboard", str(run), "--export", str(tmp_path)]) == 2
    monkeypatch.setattr(export, "MOST_CHOSEN", 0)
    assert cli.main(["dashboard", str(run), "--export", page]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 5 and all(error.startswith("lockstep dashboard: ") for error in errors)
    assert "no run in" in errors[0] and "does not exist" in errors[1] and "No such file" in errors[2]
    assert not (tmp_path / "report.html").exists()


def test_addresses_are_written_as_the_page_does() -> None:
    """Against what `new URLSearchParams({run: ...}).toString()` gives."""
    wanted = Recorded("/api/curve", {"run": "a b/ü~*-._+&=<\"'", "metric": "val@1"})
    assert wanted.url == "/api/curve?run=a+b%2F%C3%BC%7E*-._%2B%26%3D%3C%22%27&metric=val%401"
    assert json_list(["a", 'b"', "ü"]) == '["a","b\\"","ü"]'


def test_damaged_runs_are_exported(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / "config.yaml").write_bytes(b"\xff\x00: [")
    (run / "metrics.jsonl").write_bytes(b"\xff\n{}\n")
    assert cli.main(["dashboard", str(run), "--export", str(tmp_path / "report.html")]) == 0
    assert recorded_in(tmp_path / "report.html")["/api/metrics?run=a"] == []


@pytest.mark.slow
def test_the_page_opens_from_a_file(browser: Any, tmp_path: Path) -> None:
    run = make_hostile_run(tmp_path / "a <b>")
    make_run(tmp_path / "runs/b", steps=3)
    page_file = tmp_path / "report.html"
    assert cli.main(["dashboard", str(run), str(tmp_path / "runs/b"), "--export", str(page_file)]) == 0
    page = browser.new_page()
    problems: list[str] = []
    page.on(
        "request",
        lambda request: (
            problems.append(request.url) if not request.url.startswith(("file:", "data:", "blob:")) else None
        ),
    )
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    shown = {
        "curves": ".js-plotly-plot",
        "rollouts": "table",
        "time": ".timeline svg, .timeline canvas, .js-plotly-plot",
        "compare": ".pair",
    }
    for panel, what in shown.items():
        page.goto("about:blank")
        page.goto(f"{page_file.as_uri()}#/{panel}?run=a+%3Cb%3E")
        page.wait_for_selector(f":is(#{panel}) :is({what})")
        assert page.locator(".problem").count() == 0, page.locator(".problem").all_inner_texts()
        assert page.title() == "Lockstep: a <b>, b"
    page.close()
    assert not problems


def test_every_recorded_address_has_an_api(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=2)
    found = Runs([tmp_path]).all()
    assert {wanted.path for wanted in export._in_turn(found)} <= APIS.keys()


def test_an_answer_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs([make_run(tmp_path / "run", steps=2)])

    def failing(request: Any) -> Any:
        raise ZeroDivisionError("a defect")

    failing.__module__ = APIS["/api/health"].__module__
    monkeypatch.setitem(APIS, "/api/health", failing)
    monkeypatch.setattr(timeline, "recorded", failing)
    answers, _ = export.recorded_answers(runs, runs.all())
    assert "/api/status?run=run" in answers and not any("/api/health" in url or "/api/time" in url for url in answers)
    assert "/api/health?run=run is left out" in caplog.text and "records no more" in caplog.text
