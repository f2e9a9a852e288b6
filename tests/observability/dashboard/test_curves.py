"""Curves: thinned points, what they are drawn over, confidence bands and settings."""

import json
import math
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from subprocess import run as run_process
from typing import Any

import numpy as np
import pytest
import yaml

from lockstep.observability.dashboard import validation_bands
from lockstep.observability.dashboard.api import curves
from lockstep.observability.dashboard.curve_points import MOST_POINTS, bucket_means, bucket_size, shown_points
from lockstep.observability.dashboard.request import ApiRequest
from lockstep.observability.dashboard.runs import Runs
from lockstep.observability.jsonl import json_line
from tests.observability.dashboard.conftest import OpenPage, Serve
from tests.observability.dashboard.made_runs import make_run, step_metrics


def ask(api: Any, folder: Path, **params: str) -> Any:
    return api(ApiRequest(Runs([folder]), params))


def until(page: Any, expression: str) -> None:
    """Wait until it is true; the page's policy forbids playwright's own way, which evaluates text inside the page."""
    deadline = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


def test_few_points_are_all_shown() -> None:
    assert shown_points(np.arange(MOST_POINTS, dtype=float)).tolist() == list(range(MOST_POINTS))
    assert shown_points(np.empty(0)).tolist() == []


@pytest.mark.parametrize("num_points", [MOST_POINTS + 1, 5003, 10_000, 123_457])
def test_extremes_and_odd_values_stay(num_points: int) -> None:
    values = np.random.default_rng(0).normal(size=num_points)
    values[[7, num_points // 2]] = np.nan
    values[num_points // 3] = np.inf
    values[num_points - 3] = 1e6
    values[11] = -1e6
    kept = shown_points(values)
    assert len(kept) <= MOST_POINTS and kept.tolist() == sorted(set(kept.tolist()))
    assert {0, 7, 11, num_points // 2, num_points // 3, num_points - 3, num_points - 1} <= set(kept.tolist())
    size = bucket_size(num_points)
    means = bucket_means(values, size)
    for begin in range(0, num_points, size):
        bucket = values[begin : begin + size]
        shown = values[kept[(kept >= begin) & (kept < begin + size)]]
        finite = bucket[np.isfinite(bucket)]
        if len(finite):
            assert finite.min() in shown and finite.max() in shown
            assert means[begin // size] == pytest.approx(finite.mean())


def test_a_bucket_without_a_number() -> None:
    values = np.full(9000, np.nan)
    values[-1] = 1.0
    kept = shown_points(values)
    assert len(kept) <= MOST_POINTS and kept[-1] == 8999
    assert math.isnan(bucket_means(values, 15)[0])


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_bytes(b"".join(map(json_line, rows)))


def test_axes(tmp_path: Path) -> None:
    """The run of steps 1 to 4 was resumed after step 2 with a larger batch; its third start trained nothing."""
    for name, batch in (("001_step_0", 8), ("002_step_3", 4), ("003_step_2", 16)):
        (tmp_path / "configs").mkdir(exist_ok=True)
        config = {"data": {"train_batch_size": batch}, "actor_rollout_ref": {"rollout": {"n": 2}}}
        (tmp_path / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(config))
    tokens = "perf/total_num_tokens"
    rows: list[dict[str, Any]] = [{"step": 0, "time": 1000.0, "a": 0.0}]
    rows += [{"step": step, "time": 1000.0 + 1800 * step, "a": step / 3, tokens: 10 * step} for step in (1, 2, 3, 4)]
    write_metrics(tmp_path, rows)
    curve = ask(curves.curve, tmp_path, run=tmp_path.name, metric="a")
    assert curve["step"] == [0, 1, 2, 3, 4] and curve["value"] == pytest.approx([0, 1 / 3, 2 / 3, 1, 4 / 3])
    assert curve["samples"] == [0, 16, 32, 64, 96]
    assert curve["tokens"] == [0, 10, 30, 60, 100]
    assert curve["hours"] == [0, 0.5, 1, 1.5, 2]
    assert curve["points"] == 5 and curve["means"] is None and curve["non_finite"] == 0


def test_a_run_without_config_or_times(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": 1, "a": 1}, {"step": 2, "a": math.inf}])
    curve = ask(curves.curve, tmp_path, run=tmp_path.name, metric="a")
    assert "samples" not in curve and "tokens" not in curve and curve["step"] == [1, 2] and curve["non_finite"] == 1
    assert all(math.isnan(hours) for hours in curve["hours"])
    assert ask(curves.curve, tmp_path, run=tmp_path.name, metric="none")["step"] == []


def test_a_long_run_is_thinned(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": step, "time": float(step), "a": step % 7} for step in range(5000)])
    curve = ask(curves.curve, tmp_path, run=tmp_path.name, metric="a")
    assert curve["points"] == 5000 and len(curve["step"]) == len(curve["value"]) <= MOST_POINTS
    means = curve["means"]
    assert means["size"] == bucket_size(5000) and len(means["value"]) == len(means["step"]) == len(means["hours"])
    assert means["step"][-1] == 4999


def test_metrics_have_meaning_and_group(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=5)
    found = {metric["name"]: metric for metric in ask(curves.metric_names, tmp_path, run="a")}
    assert found["actor/entropy"] == {
        "name": "actor/entropy",
        "group": "actor",
        "meaning": "mean entropy of the next-token distribution, in nats",
        "main": 3,
    }
    assert found["critic/score/mean"]["main"] == 0 and found["val-core/math/reward/mean@2"]["main"] == 1
    assert found["critic/score/max"]["main"] is None


def test_bands_against_the_statistics_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a", steps=5, prompts=6)
    rows = [json.loads(line) for line in (run / "validation/5.jsonl").read_text().splitlines()]
    by_prompt: dict[str, list[float]] = {}
    for row in rows:
        by_prompt.setdefault(row["uid"], []).append(row["score"])
    means = [fmean(scores) for scores in by_prompt.values()]
    metric = "val-core/math/reward/mean@2"
    with open(run / "metrics.jsonl", "ab") as metrics:
        metrics.write(json_line({"step": 5, metric: fmean(means), "val-aux/math/acc/mean@4": fmean(means)}))
        metrics.write(json_line({"step": 4, metric: fmean(means)}))
    band = ask(curves.band, tmp_path, run="a", metric=metric)
    half = 1.96 * stdev(means) / math.sqrt(6)
    assert band["step"] == [5] and band["prompts"] == [6] and band["unread"] == 0
    assert band["low"] == pytest.approx([fmean(means) - half]) and band["high"] == pytest.approx([fmean(means) + half])
    assert (
        ask(curves.band, tmp_path, run="a", metric="val-aux/math/acc/mean@4")["step"] == []
    )  # the dump has two responses
    assert ask(curves.band, tmp_path, run="a", metric="actor/entropy")["step"] == []
    with open(run / "metrics.jsonl", "ab") as metrics:
        metrics.write(json_line({"step": 5, metric: fmean(means) + 0.01}))
    assert ask(curves.band, tmp_path, run="a", metric=metric)["step"] == []  # the dump is not of this mean
    monkeypatch.setattr(validation_bands, "MOST_BYTES", 10)
    assert ask(curves.band, tmp_path, run="a", metric=metric)["unread"] == 0


def test_bands_of_several_data_sources(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=1)
    scores = {"math": [0.0, 1.0, 1.0], "code/easy": [1.0, 0.5]}
    rows = [
        {"input": f"{source} {place}", "uid": f"{source} {place}", "data_source": source, "score": score}
        for source, values in scores.items()
        for place, score in enumerate(values)
    ]
    (run / "validation/1.jsonl").write_bytes(b"".join(map(json_line, rows)))
    names = {source: f"val-core/{source}/reward/mean@1" for source in scores}
    write_metrics(run, [{"step": 1} | {names[source]: fmean(values) for source, values in scores.items()}])
    for source, values in scores.items():
        band = ask(curves.band, tmp_path, run="a", metric=names[source])
        half = 1.96 * stdev(values) / math.sqrt(len(values))
        assert band["high"] == pytest.approx([fmean(values) + half]) and band["prompts"] == [len(values)]


def test_bands_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a", steps=1, prompts=3)
    line = (run / "validation/1.jsonl").read_bytes()
    values = [json.loads(row)["score"] for row in line.splitlines()]
    metric = "val-core/math/reward/mean@2"
    for step in (2, 3):
        (run / f"validation/{step}.jsonl").write_bytes(line)
    write_metrics(run, [{"step": step, metric: fmean(values)} for step in (1, 2, 3)])
    monkeypatch.setattr(validation_bands, "MOST_BYTES", len(line))
    first = ask(curves.band, tmp_path, run="a", metric=metric)
    assert first["step"] == [3] and first["unread"] == 2
    ask(curves.band, tmp_path, run="a", metric=metric)
    assert ask(curves.band, tmp_path, run="a", metric=metric)["step"] == [1, 2, 3]


def test_bands_that_another_thread_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgotten(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            pass

    run = make_run(tmp_path / "a", steps=1, prompts=3)
    values = [json.loads(row)["score"] for row in (run / "validation/1.jsonl").read_text().splitlines()]
    write_metrics(run, [{"step": 1, "val-core/math/reward/mean@2": fmean(values)}])
    monkeypatch.setattr(validation_bands, "_read", Forgotten())
    assert ask(curves.band, tmp_path, run="a", metric="val-core/math/reward/mean@2")["step"] == [1]


def test_settings_that_differ(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=2)
    make_run(tmp_path / "b", steps=2, settings={"data": {"max_response_length": 128}})
    make_run(tmp_path / "c", steps=2)
    (tmp_path / "c/config.yaml").write_text("\x00")
    found = ask(curves.settings, tmp_path, runs=json.dumps(["a", "b", "c"]))
    assert found["runs"] == ["a", "b"] and found["left_out"] == 0
    assert found["rows"] == [{"key": "data.max_response_length", "values": ["64", "128"]}]
    assert len(found["unread"]) == 1 and found["unread"][0].startswith("c: ")
    for wrong in ("", "a", "[]", "{}", json.dumps(["a"] * 21), "[" * 10**5):
        with pytest.raises(ValueError, match="JSON list"):
            ask(curves.settings, tmp_path, runs=wrong)
    with pytest.raises(ValueError, match="no run 'd'"):
        ask(curves.settings, tmp_path, runs='["d"]')


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, lockstep.observability.dashboard.app; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert run_process([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_the_panel(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=30)
    make_run(tmp_path / "b", steps=20, settings={"data": {"max_response_length": 128}})
    hostile = "x/<img src=x onerror=alert(1)>"
    with open(run / "metrics.jsonl", "ab") as metrics:
        metrics.write(json_line({"step": 30, hostile: 1.0, "actor/pg_loss": math.nan}))
    url = serve(tmp_path)
    page = open_page(f"{url}/#/curves?run=a")
    page.wait_for_selector("#curves figure >> nth=0 >> .js-plotly-plot")
    titles = page.locator("#curves figure h3").all_inner_texts()
    assert titles[:2] == ["critic/score/mean", "val-core/math/reward/mean@2"] and "timing_s/step" in titles
    assert "mean entropy of the next-token distribution" in page.inner_text("#curves")

    page.wait_for_selector("#curves figure >> nth=1 >> .scatterlayer path")
    page.hover("#curves figure >> nth=0 >> .nsewdrag")
    page.wait_for_selector("#curves figure >> nth=1 >> .hoverlayer text")  # the same step in the other chart

    page.click("text=Choose metrics")
    page.fill("[aria-label='Filter metrics']", "onerror")
    page.check(f"label.choice:has-text('{hostile}')")
    page.wait_for_selector("#curves figure h3:has-text('onerror')")
    assert page.locator("#curves figure img").count() == 0
    page.goto(f"{url}/#/curves?run=a&metric=actor/pg_loss")
    page.wait_for_selector("#curves figure .note:has-text('1 values are not numbers')")

    page.click("text=Compare with other runs")
    page.check("input[type=checkbox][value=b]")
    page.wait_for_selector("#curves .settings table")
    assert "data.max_response_length" in page.inner_text("#curves .settings")
    page.select_option("#curves .controls select", "hours")
    page.check("text=log scale")
    page.focus("[aria-label=Smoothing]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#curves .controls output") == "mean of 5 steps"
    address = page.evaluate("location.hash")
    assert all(part in address for part in ("metric=actor%2Fpg_loss", "with=b", "x=hours", "log=1", "smooth=5"))
    page.reload()
    page.wait_for_selector("#curves .js-plotly-plot")
    figure = "document.querySelector('#curves .js-plotly-plot')"
    until(page, f"{figure}.data.length > 3 && {figure}.layout.yaxis.type === 'log'")
    with page.expect_download() as download:
        page.click("[aria-label='Download actor/pg_loss as CSV']")
    lines = download.value.path().read_text().splitlines()
    assert lines[0] == '"run","step","samples","tokens","hours","actor/pg_loss"' and len(lines) == 51

    page.goto("about:blank")
    page.goto(f"{url}/#/curves?run=a&metric=critic/score/max")
    until(page, f"{figure}?.data?.[0].x.length === 30")
    page.evaluate(f"Plotly.relayout({figure}, {{'xaxis.range': [5, 10]}})")
    with open(run / "metrics.jsonl", "ab") as metrics:
        metrics.write(json_line({"step": 31, "time": 1.7e9 + 310} | step_metrics(31, 31)))
    until(page, f"{figure}.data[0].x.length === 31")
    assert page.evaluate(f"{figure}.layout.xaxis.range") == [5, 10]


@pytest.mark.slow
def test_the_panel_smooths_as_a_plain_mean_does(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=30)
    page = open_page(f"{serve(tmp_path)}/#/curves?run=a&metric=critic/score/mean&smooth=5")
    figure = "document.querySelector('#curves .js-plotly-plot')"
    until(page, f"{figure}?.data?.length === 2")
    values = [json.loads(line)["critic/score/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = [fmean(values[max(0, place - 4) : place + 1]) for place in range(30)]
    assert page.evaluate(f"{figure}.data[1].y") == pytest.approx(expected)
