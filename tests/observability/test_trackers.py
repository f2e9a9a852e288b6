"""The tracker registry, Tracking, metrics.jsonl, and the file, tensorboard and wandb trackers."""

import json
import math
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.checks import LOGGERS
from lockstep.observability.jsonl import METRICS_FILE, JsonlFile, json_line, read_metrics, truncate_after
from lockstep.observability.tracker import Metrics, RunInfo
from lockstep.observability.trackers import TRACKERS, Tracking

REPOSITORY = Path(__file__).parents[2]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class RecordingTracker:
    """A custom tracker, given by reference."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.events: list[Any] = []
        recorded.append(self)

    def log(self, data: Metrics, step: int) -> None:
        self.events.append((dict(data), step))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.events.append((name, columns, rows, step))

    def finish(self) -> None:
        self.events.append("finished")


recorded: list[RecordingTracker] = []


@pytest.fixture
def outside_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("outside_trackers")
    module.Recording = RecordingTracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outside_trackers", module)
    recorded.clear()
    return "outside_trackers:Recording"


def test_metrics_are_always_written(tmp_path: Path) -> None:
    with Tracking("project", "experiment", [], {}, tmp_path / "new/run") as tracking:
        tracking.log({"actor/pg_loss": 0.5, "num": 3, "text": "grün"}, step=1)
        assert len(lines_of(tmp_path / "new/run" / METRICS_FILE)) == 1  # flushed at once
        tracking.log(data={"step": 99, "actor/pg_loss": torch.tensor(0.25), "lr": np.float32(0.5)}, step=2)
    first, second = lines_of(tmp_path / "new/run" / METRICS_FILE)
    assert first["time"] == pytest.approx(second["time"], abs=60)
    assert first | {"time": 0} == {"step": 1, "time": 0, "actor/pg_loss": 0.5, "num": 3, "text": "grün"}
    assert second | {"time": 0} == {"step": 2, "time": 0, "actor/pg_loss": 0.25, "lr": 0.5}


def test_non_finite_numbers_are_null_and_readable() -> None:
    line = json_line({"a": float("nan"), "b": np.float64("-inf"), "c": [1.0, math.inf], "d": torch.tensor(math.nan)})
    assert json.loads(line, parse_constant=pytest.fail) == {
        "a": None,
        "b": None,
        "c": [1.0, None],
        "d": None,
        "non_finite": {"a": "nan", "b": "-inf", "c.1": "inf", "d": "nan"},
    }


def test_any_value_is_one_line_of_json() -> None:
    line = json_line({"text": "a\nb", "half": "\ud83d", "array": np.arange(3), "path": Path("x"), "n": np.int64(2)})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"text": "a\nb", "half": "\ud83d", "array": [0, 1, 2], "path": "x", "n": 2}


def test_tracking_logs_to_every_tracker(outside_tracker: str, tmp_path: Path) -> None:
    tracking = Tracking("p", "e", [outside_tracker], {"a": 1}, tmp_path, total_steps=5, start_step=2)
    tracking.log({"x": 1}, step=3)
    tracking.log_table("val/generations", ["input"], [["q"]], step=3)
    tracking.finish()
    tracking.finish()
    assert recorded[0].run == RunInfo("p", "e", tmp_path, {"a": 1}, total_steps=5, start_step=2)
    assert recorded[0].events == [({"x": 1}, 3), ("val/generations", ["input"], [["q"]], 3), "finished"]


def test_failed_tracker_start_closes_the_others(
    outside_tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r'trainer\.logger includes wandb.*pip install "lockstep-rl\[wandb\]"'):
        Tracking("p", "e", [outside_tracker, "wandb"], {}, tmp_path)
    assert recorded[0].events == ["finished"]


def test_unknown_tracker_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.logger=tensorbord: no such tracker\. Did you mean 'tensorboard'\?"):
        Tracking("p", "e", ["console", "tensorbord"], {}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unwritable_folder_error_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"trainer\.default_local_dir=.*cannot write there"):
        Tracking("p", "e", [], {}, tmp_path / "file/run")


def write_steps(path: Path, steps: Sequence[int], tail: bytes = b"") -> None:
    path.write_bytes(b"".join(json_line({"step": step, "x": 0}) for step in steps) + tail)


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in lines_of(path)]


def test_truncate_after(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.jsonl"
    truncate_after(path, 3)
    assert not path.exists()
    write_steps(path, [0, 1, 2, 3, 3, 4, 5], tail=b'{"step": 6, "x')
    truncate_after(path, 3)
    assert steps_of(path) == [0, 1, 2, 3, 3]
    assert "dropping incomplete line 8" in caplog.text
    assert os.listdir(tmp_path) == ["m.jsonl"]


@pytest.mark.parametrize(("start_step", "kept"), [(2, [1, 2, 9]), (0, [9]), (None, [1, 2, 3, 9])])
def test_resuming_drops_lines_after_the_checkpoint(start_step: int | None, kept: list[int], tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    write_steps(path, [1, 2, 3], tail=b'{"step": 4, "actor/pg_l')
    with Tracking("p", "e", ["file"], {}, tmp_path, start_step=start_step) as tracking:
        tracking.log({"x": 1}, step=9)
    assert steps_of(path) == kept
    assert (tmp_path / "metrics.jsonl.old").exists() == (start_step == 0)


@pytest.mark.parametrize(
    ("steps", "warning"),
    [
        ([0, 1, 2, 5, 7, 8], "has no line for steps 3 to 4, 6"),
        ([1, 2, 3, 4, 5, 6], "has no line for step 7"),
        ([1, 2, 3, 4, 5, 6, 7], None),  # the line of the resumed step is written from the checkpoint
        ([4, 5, 6, 7, 8], None),  # resumed from another run's checkpoint
        ([], None),
    ],
)
def test_missing_steps_are_named(
    steps: list[int], warning: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_steps(tmp_path / METRICS_FILE, steps)
    Tracking("p", "e", ["file"], {}, tmp_path, start_step=8).finish()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([f"{tmp_path / METRICS_FILE} {warning}"] if warning else [])


def test_sync_flushes_the_metrics_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with Tracking("p", "e", [], {}, tmp_path) as tracking:
        tracking.log({"x": 1}, step=1)
        monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
        tracking.sync()
    assert synced == [(tmp_path / METRICS_FILE).stat().st_ino]


@pytest.mark.parametrize("content", [b"", b'{"step"', b"x" * 200_000, b'{"step": 1}\n' + b"x" * 200_000])
def test_unfinished_line_is_cut(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    file = JsonlFile(path, "key")
    file.append({}, step=2)
    file.close()
    assert steps_of(path) == ([1, 2] if b"\n" in content else [2])


def test_lines_survive_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from lockstep.observability.trackers import Tracking;"
        "t = Tracking('p', 'e', ['file'], {}, sys.argv[1]);"
        "[t.log({'x': i}, step=i) for i in range(1, 4)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=60, check=False)
    assert child.returncode == -9
    assert steps_of(tmp_path / METRICS_FILE) == steps_of(tmp_path / "tracker.jsonl") == [1, 2, 3]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk_error_names_the_file_and_the_key(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "m.jsonl", "trainer.default_local_dir")
    file.close()
    file._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=r"cannot write .*m\.jsonl \(set by trainer\.default_local_dir\): No space left"):
        file.append({"x": 1}, step=1)
    file.close()


def test_file_tracker_path_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FILE_LOGGER_PATH", str(tmp_path / "elsewhere/log.jsonl"))
    with Tracking("p", "e", ["file"], {}, tmp_path / "run") as tracking:
        tracking.log({"x": 1.5}, step=1)
        tracking.log_table("val/generations", ["input", "score"], [["q", 1.0], ["r", math.nan]], step=1)
    (metrics,) = lines_of(tmp_path / "elsewhere/log.jsonl")
    assert (metrics["step"], metrics["x"]) == (1, 1.5)
    assert metrics.keys() == {"step", "time", "x"}
    (table,) = lines_of(tmp_path / "elsewhere/log.tables.jsonl")
    assert table["name"] == "val/generations" and table["rows"] == [["q", 1.0], ["r", None]]


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    with Tracking("p", "e", ["tensorboard"], {}, tmp_path) as tracking:
        for step in (1, 2, 3):
            tracking.log({"actor/pg_loss": step / 2, "note": "text", "critic/score/mean": np.float32(step)}, step=step)
        tracking.log_table("val/generations", ["input"], [["a|b\nc"]], step=3)
    expected = {"actor/pg_loss": [(1, 0.5), (2, 1.0), (3, 1.5)], "critic/score/mean": [(1, 1.0), (2, 2.0), (3, 3.0)]}
    assert read_scalars(tmp_path / "tensorboard") == expected


def test_tensorboard_drops_steps_after_the_resumed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    for start_step, value in ((0, 1.0), (1, 2.0)):
        with Tracking("p", "e", ["tensorboard"], {}, tmp_path, start_step=start_step) as tracking:
            for step in range(start_step + 1, 3):
                tracking.log({"x": value}, step=step)
    assert read_scalars(tmp_path / "events")["x"] == [(1, 1.0), (2, 2.0)]
    with Tracking("p", "e", ["tensorboard"], {}, tmp_path, start_step=0) as tracking:
        tracking.log({"x": 3.0}, step=0)
    assert read_scalars(tmp_path / "events")["x"] == [(0, 3.0)]


class FakeWandb(types.ModuleType):
    """Records the calls to wandb."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []
        self.new_id = "fresh-id"

    def init(self, **options: Any) -> Any:
        self.calls.append(("init", options))
        run_id = options["id"] or self.new_id
        return types.SimpleNamespace(
            id=run_id,
            log=lambda data, step: self.calls.append(("log", data, step)),
            finish=lambda: self.calls.append("finish"),
        )

    def Table(self, columns: list[str], data: list[Any]) -> Any:
        return ("table", columns, data)


def test_wandb_resumes_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Tracking("p", "e", ["wandb"], {"lr": 1}, tmp_path, start_step=0) as tracking:
        tracking.log({"x": torch.tensor(2.0)}, step=1)
        tracking.log_table("val/generations", ["input"], [["q"]], step=1)
    monkeypatch.setattr(fake, "new_id", "evaluation")
    Tracking("p", "e", ["wandb"], {}, tmp_path, start_step=None).finish()  # a separate run
    Tracking("p", "e", ["wandb"], {}, tmp_path, start_step=1).finish()
    options = fake.calls[0][1]
    assert "mode" not in options  # so WANDB_MODE applies
    assert options == {
        "project": "p",
        "name": "e",
        "config": {"lr": 1},
        "dir": str(tmp_path),
        "id": None,
        "resume": None,
    }
    assert fake.calls[1:4] == [
        ("log", {"x": 2.0}, 1),
        ("log", {"val/generations": ("table", ["input"], [["q"]])}, 1),
        "finish",
    ]
    assert fake.calls[4][1]["id"] is None
    assert fake.calls[6][1]["id"] == "fresh-id" and fake.calls[6][1]["resume"] == "allow"


def test_config_lists_every_tracker() -> None:
    assert sorted(LOGGERS) == list(TRACKERS)


def test_metrics_are_read_as_they_were_logged(tmp_path: Path) -> None:
    with Tracking("p", "e", [], run_dir=tmp_path) as tracking:
        tracking.log({"loss": math.inf, "gap": 0.5}, step=1)
        size = (tmp_path / METRICS_FILE).stat().st_size
        tracking.log({"loss": 0.25}, step=2)
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"step": 3, "lo')
    rows = read_metrics(tmp_path / METRICS_FILE)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, math.inf), (2, 0.25)] and "non_finite" not in rows[0]
    assert read_metrics(tmp_path / METRICS_FILE, begin=size) == rows[1:]
    assert read_metrics(tmp_path / "absent.jsonl") == []
