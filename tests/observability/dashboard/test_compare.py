"""Two runs, or two steps of one, on the same prompts."""

import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from lockstep.observability import compare as compare_command
from lockstep.observability.curves import read_runs
from lockstep.observability.dashboard import prompt_pairs
from lockstep.observability.dashboard.api import compare
from lockstep.observability.jsonl import json_line
from tests.observability.dashboard.conftest import OpenPage, Serve
from tests.observability.dashboard.made_runs import make_run
from tests.observability.dashboard.test_curves import ask, until


def write_dump(run: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """Training samples; rows lack what they do not name."""
    (run / f"rollouts/{step}.jsonl").write_bytes(b"".join(map(json_line, rows)))


def prompts(folder: Path, **params: str) -> Any:
    return ask(compare.compared_prompts, folder, **params)


def test_pairs_against_a_plain_computation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=6, prompts=30, n=3)
    found = prompts(tmp_path, kind="train", left="a", left_step="1", right="a", right_step="6")
    means: dict[int, dict[str, float]] = {}
    for step in (1, 6):
        rows = [json.loads(line) for line in (run / f"rollouts/{step}.jsonl").read_text().splitlines()]
        texts = {row["input"] for row in rows}
        means[step] = {text: fmean(row["score"] for row in rows if row["input"] == text) for text in texts}
    changes = {text: means[6][text] - means[1][text] for text in means[1]}
    summary = found["summary"]
    assert summary["num_pairs"] == 30 and found["total"] == 30 and len(found["items"]) == compare.PAGE
    assert summary["change"] == pytest.approx(fmean(changes.values()))
    assert summary["error"] == pytest.approx(stdev(changes.values()) / math.sqrt(30))
    assert summary["left"] == pytest.approx(fmean(means[1].values()))
    assert summary["num_better"] == sum(change > 0 for change in changes.values())
    assert summary["num_worse"] == sum(change < 0 for change in changes.values())
    second = prompts(tmp_path, kind="train", left="a", left_step="1", right="a", right_step="6", page="1")
    items = found["items"] + second["items"]
    assert {item["prompt"]: pytest.approx(item["change"]) for item in items} == changes
    sizes = [abs(item["change"]) for item in items]
    assert sizes == sorted(sizes, reverse=True)
    changed = prompts(tmp_path, kind="train", left="a", left_step="1", right="a", right_step="6", changed="1")
    assert changed["total"] == sum(bool(change) for change in changes.values())
    first = items[0]
    assert first["left"]["n"] == 3 and len(first["left"]["responses"]) == 3
    assert fmean(each["score"] for each in first["left"]["responses"]) == pytest.approx(first["left"]["mean"])


def test_the_last_step_is_the_default(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=4)
    make_run(tmp_path / "b", steps=6)
    found = prompts(tmp_path, kind="validation", left="a", right="b")
    assert (found["left_step"], found["right_step"], found["summary"]["num_pairs"]) == (4, 6, 4)
    with pytest.raises(ValueError, match="step 5 has no dump"):
        prompts(tmp_path, kind="validation", left="a", left_step="5", right="b")


def test_prompts_of_data_in_another_order(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=2, prompts=2)
    rows = [
        {"input": text, "output": "x", "score": 1.0, "index": index, "uid": str(index)}
        for index, text in enumerate("pqr")
    ]
    write_dump(run, 1, rows)
    write_dump(
        run, 2, [row | {"index": 9 - row["index"], "uid": f"u{row['index']}", "score": 0.25} for row in rows[1:]]
    )
    found = prompts(tmp_path, kind="train", left="a", left_step="1", right="a", right_step="2")
    assert found["matched_by"] == "text" and found["summary"]["change"] == -0.75
    assert [item["prompt"] for item in found["items"]] == ["q", "r"]
    assert (found["left_prompts"], found["right_prompts"]) == (3, 2)


def test_acc_beside_the_score(tmp_path: Path) -> None:
    """Higher scores of answers that stay wrong."""
    run = make_run(tmp_path / "a", steps=2, prompts=2)
    rows = [
        {"input": text, "output": "x", "score": 0.0, "acc": acc} for text, acc in (("p", 0.0), ("p", 1.0), ("q", 0.0))
    ]
    write_dump(run, 1, [*rows, {"input": "r", "score": 0.0}])
    write_dump(run, 2, [row | {"score": 1.0} for row in rows] + [{"input": "r", "score": 1.0, "acc": 1.0}])
    found = prompts(tmp_path, kind="train", left="a", left_step="1", right="a", right_step="2")
    summary = found["summary"]
    assert (summary["num_better"], summary["left_acc"], summary["right_acc"]) == (3, 0.25, 0.25)
    items = {item["prompt"]: item for item in found["items"]}
    assert (
        items["p"]["left"]["acc"] == 0.5 and math.isnan(items["r"]["left"]["acc"]) and items["r"]["right"]["acc"] == 1.0
    )
    assert [response["acc"] for response in items["p"]["left"]["responses"]] == [0.0, 1.0]


def test_rows_of_any_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a", steps=2, prompts=2)
    write_dump(
        run, 1, [{"input": "p", "score": "high"}, {"input": ["list"], "output": 3}, {"input": "q", "score": 1.0}]
    )
    with open(run / "rollouts/1.jsonl", "ab") as dump:
        dump.write(b'\xff\x00\n[1]\n{"input": "z", "score": 1')
    write_dump(run, 2, [{"input": "p", "score": 1.0, "output": "y" * 5000}, {"input": "q", "score": 0.5}])
    found = prompts(tmp_path, kind="train", left="a", left_step="1", right="a", right_step="2")
    assert found["summary"] == {
        "num_pairs": 1,
        "left": 1.0,
        "right": 0.5,
        "change": -0.5,
        "error": pytest.approx(math.nan, nan_ok=True),
        "num_better": 0,
        "num_worse": 1,
        "left_acc": pytest.approx(math.nan, nan_ok=True),
        "right_acc": pytest.approx(math.nan, nan_ok=True),
    }
    assert [item["prompt"] for item in found["items"]] == ["q", "p"]
    text = found["items"][1]["right"]["responses"][0]["text"]
    assert len(text) < 1600 and "3,500 characters" in text
    write_dump(run, 2, [{"input": "other", "score": 1.0}])
    monkeypatch.setattr(prompt_pairs, "READ_BYTES", 0)
    assert prompts(tmp_path, kind="train", left="a", left_step="1", right="a", right_step="2")["items"] == []
    monkeypatch.setattr(compare, "READ_BYTES", 0)
    same = prompts(tmp_path, kind="train", left="a", left_step="2", right="a", right_step="2")
    assert same["items"][0]["left"]["responses"][0]["text"] is None


def test_results_are_those_of_the_command(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", steps=5), make_run(tmp_path / "b", steps=10)]
    with open(folders[0] / "metrics.jsonl", "ab") as metrics:
        metrics.write(json_line({"step": 6, "critic/score/mean": math.nan}))
    found = ask(compare.compared_results, tmp_path, runs='["a","b"]')
    expected = list(compare_command.results(read_runs(folders)))
    assert [(row["name"], row["values"]) for row in found["rows"]] == expected and found["runs"] == ["a", "b"]


@pytest.mark.slow
def test_the_panel(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=10, prompts=30)
    make_run(tmp_path / "b", steps=10, prompts=30, settings={"data": {"max_response_length": 128}})
    rows = [{"input": "<img src=x onerror=alert(1)>", "output": "</script><script>alert(1)</script>", "score": 1.0}]
    write_dump(tmp_path / "a", 3, rows)
    write_dump(tmp_path / "b", 3, [rows[0] | {"score": 0.0}])
    url = serve(tmp_path)
    page = open_page(f"{url}/#/compare?run=a&other=b", width=400, dark=True)
    page.wait_for_selector("#compare .pair")
    assert "data.max_response_length" in page.inner_text("#compare table >> nth=0")
    assert "30 prompts in both" in page.inner_text("#compare [role=status]")
    assert "Mean acc " in page.inner_text("#compare [role=status]")
    assert " · acc " in page.inner_text("#compare .pair h3 >> nth=0")
    page.check("text=only changed")
    until(page, "location.hash.includes('changed=1')")
    page.goto(f"{url}/#/compare?run=a&other=b&kind=train&left_step=3&right_step=3")
    page.wait_for_selector("#compare .pair h3:has-text('<img')")
    assert "score -1 lower · <img src=x onerror=alert(1)>" in page.inner_text("#compare .pair h3")
    page.select_option("[aria-label='step of a']", "4")
    until(page, "document.querySelector('#compare [role=status]').textContent.startsWith('No prompt is in both')")
