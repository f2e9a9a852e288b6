"""Trackers of external services: the real packages, writing to local disk; each test needs its package."""

import importlib.util
import json
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lockstep.observability.mlflow import metric_name
from lockstep.observability.trackers import TRACKERS, Tracking

COLUMNS = ["input", "output", "score"]
ROWS = [["1+1=", "a|b\nc", 0.5], ["2+2=", "four", 1.0]]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def track(tracker: str, folder: Path) -> None:
    """A run of two steps, and a second process that resumes from the first step."""
    config = {"trainer": {"seed": 1, "logger": [tracker]}, "empty": {}}
    with Tracking("project", "experiment", [tracker], config, folder, start_step=0) as tracking:
        tracking.log({"actor/pg_loss": 0.5, "val-core/openai/gsm8k/reward/mean@4": 0.25, "text": "x"}, step=1)
        tracking.log_table("val/generations", COLUMNS, ROWS, step=1)
        tracking.log({"actor/pg_loss": math.nan}, step=2)
    with Tracking("project", "experiment", [tracker], config, folder, start_step=1) as tracking:
        tracking.log({"actor/pg_loss": 0.125}, step=2)
        tracking.log_table("val/generations", COLUMNS, ROWS[:1], step=2)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_missing_package_error_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    message = rf'trainer\.logger includes {name}, which is not installed: pip install "lockstep-rl\[{name}\]"'
    with pytest.raises(ImportError, match=message):
        Tracking("p", "e", [name], {}, tmp_path)


def test_the_services() -> None:
    assert list(TRACKERS) == ["console", "file", "mlflow", "swanlab", "tensorboard", "wandb"]


@needs("wandb")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    track("wandb", tmp_path)
    importlib.import_module("wandb").teardown()  # it keeps the settings of this test otherwise
    run_id = (tmp_path / "wandb_run_id.txt").read_text()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2  # one per process, both of the same run, for `wandb sync`
    assert all(file.stat().st_size > 0 for file in files)
    history = b"".join(file.read_bytes() for file in files)
    assert b"actor/pg_loss" in history and b"val-core/openai/gsm8k/reward/mean@4" in history
    tables = [json.loads(file.read_text()) for file in (tmp_path / "wandb").glob("**/media/table/val/*.table.json")]
    assert sorted((table["columns"], len(table["data"])) for table in tables) == [(COLUMNS, 1), (COLUMNS, 2)]
    assert any(table["data"][0] == ROWS[0] for table in tables)


@needs("mlflow")
def test_mlflow_in_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    track("mlflow", tmp_path)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])  # the second process continued the first one's run
    assert (run.info.run_name, run.info.status) == ("experiment", "FINISHED")
    assert run.info.run_id == (tmp_path / "mlflow_run_id.txt").read_text()
    assert run.data.params == {"trainer.seed": "1", "trainer.logger": "['mlflow']", "empty": "{}"}
    losses = client.get_metric_history(run.info.run_id, "actor/pg_loss")
    assert [(metric.step, metric.value) for metric in losses if not math.isnan(metric.value)] == [(1, 0.5), (2, 0.125)]
    assert run.data.metrics["val-core/openai/gsm8k/reward/mean_at_4"] == 0.25
    (artifact,) = (tmp_path / "mlruns").glob("*/*/artifacts/val/generations.json")
    table = json.loads(artifact.read_text())
    assert table["columns"] == ["step", *COLUMNS]
    assert table["data"] == [[1, *ROWS[0]], [1, *ROWS[1]], [2, *ROWS[0]]]


@needs("mlflow")
def test_mlflow_failure_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MlflowException("the server is gone")

    with Tracking("p", "e", ["mlflow"], {}, tmp_path, start_step=0) as tracking:
        monkeypatch.setattr(MlflowClient, "log_batch", fail)
        with caplog.at_level(logging.WARNING):
            tracking.log({"x": 1.0}, step=3)
    assert "mlflow failed to log step 3 (the server is gone)" in caplog.text
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["x"] == 1.0


def test_mlflow_metric_names() -> None:
    assert metric_name("val-core/a b/reward/best@8/mean") == "val-core/a b/reward/best_at_8/mean"
    assert metric_name("timing_s/x:y%") == "timing_s/x_y_"


@needs("swanlab")
def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.delenv("SWANLAB_LOG_DIR", raising=False)
    track("swanlab", tmp_path)
    run_id = (tmp_path / "swanlab_run_id.txt").read_text()
    files = sorted((tmp_path / "swanlog").glob(f"run-*-{run_id}/run-{run_id}.swanlab"))
    assert files and b"actor/pg_loss" in b"".join(file.read_bytes() for file in files)
    tables = list((tmp_path / "swanlog").glob("**/media/echarts/*.json"))
    assert any("four" in table.read_text() for table in tables)


class FakeSwanlab(types.ModuleType):
    """Records the calls to swanlab."""

    def __init__(self) -> None:
        super().__init__("swanlab")
        self.calls: list[Any] = []
        self.echarts = types.SimpleNamespace(Table=FakeTable)

    def init(self, **options: Any) -> Any:
        self.calls.append(("init", options))
        return types.SimpleNamespace(
            id=options["id"] or "fresh-id",
            log=lambda data, step: self.calls.append(("log", data, step)),
            finish=lambda: self.calls.append("finish"),
        )


class FakeTable:
    def add(self, columns: list[str], rows: list[list[str]]) -> None:
        self.content = (columns, rows)


def test_swanlab_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSwanlab()
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    monkeypatch.delenv("SWANLAB_LOG_DIR", raising=False)
    track("swanlab", tmp_path)
    first, second = (call[1] for call in fake.calls if call[0] == "init")
    assert (first["project"], first["name"], first["id"]) == ("project", "experiment", None)
    assert first["log_dir"] == str(tmp_path / "swanlog") and "mode" not in first  # so SWANLAB_MODE applies
    assert (second["id"], second["resume"]) == ("fresh-id", "allow")
    assert fake.calls[1] == ("log", {"actor/pg_loss": 0.5, "val-core/openai/gsm8k/reward/mean@4": 0.25}, 1)
    assert fake.calls[2][1]["val/generations"].content == (
        COLUMNS,
        [["1+1=", "a|b\nc", "0.5"], ["2+2=", "four", "1.0"]],
    )
    assert fake.calls.count("finish") == 2
