"""Remote checkpoints: what is at the store is complete and the same, a new machine resumes from it, and its faults stay there."""

import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig
from lockstep.config.sft import SFTConfig
from lockstep.trainer import fsdp_sft_trainer, main_ppo
from lockstep.trainer.ppo.rollout_sources.journal import trained_groups
from lockstep.trainer.run import remote_copies, remote_store
from lockstep.trainer.run.checkpoint import TRACKER, CheckpointStore, verify
from lockstep.trainer.run.preflight import _remote_store as preflight_remote_store, preflight
from lockstep.trainer.run.remote_store import UPLOAD, RemoteStore, StoreError
from lockstep.trainer.run.training_run import TrainingRun
from lockstep.utils.checkpoint_folder import MANIFEST, read_manifest
from tests.metrics import metrics_of, numbers_of
from tests.programs import Program
from tests.remote import FaultyFileSystem, emptied, planted
from tests.tiny import save_tiny_model

URL = "faulty://bucket/run"
PROGRAMS: dict[type, list[str]] = {
    PPOConfig: ["actor_rollout_ref.model.path=m", "data.train_files=[t.parquet]", "algorithm.adv_estimator=grpo"],
    SFTConfig: ["model.path=m", "data.train_files=[t.parquet]"],
    DPOConfig: ["model.path=m", "data.train_files=[t.parquet]"],
}
KEEP = dict.fromkeys(PROGRAMS, ("max_ckpt_to_keep",)) | {
    PPOConfig: ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote_copies, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(remote_copies, "LONGEST_PAUSE_S", 0.004)
    monkeypatch.setattr(remote_store, "RETRY_AFTER_S", (0.0, 0.0))
    emptied()
    yield
    emptied()
    fsspec.filesystem("memory").store.clear()


@cache
def config_of(cls: type) -> Any:
    return load_config(cls, [*PROGRAMS[cls], "trainer.logger=[]", "trainer.hdfs_wait_s=30"], run_checks=False)


def run_of(
    folder: Path, cls: type = SFTConfig, url: str | None = URL, model: str | None = None, **settings: Any
) -> TrainingRun:
    """model: `model.path` of an SFT run. settings: keys of `trainer`."""
    config = config_of(cls)
    if model is not None:
        config = replace(config, model=replace(config.model, path=model))
    settings |= {"default_local_dir": str(folder), "default_hdfs_dir": url}
    return TrainingRun(replace(config, trainer=replace(config.trainer, **settings)))


def save(run: TrainingRun, step: int, text: str = "weights") -> None:
    def write(folder: Path) -> None:
        (folder / "actor" / "shards").mkdir(parents=True)
        (folder / "actor" / "shards" / "0.bin").write_text(f"{text} {step}")
        (folder / "empty").write_text("")

    run.save(step, write, loader={"position": step}, trainer={"metrics": {"loss": step / 10}})


def begun(run: TrainingRun, num_steps: int = 99) -> TrainingRun:
    """Claimed and opened."""
    found = run.claim()
    run.open(found[0] if found else 0, num_steps, {"loss": found[0] / 10} if found else {})
    return run


def train(folder: Path, steps: range, **settings: Any) -> None:
    """A whole run that saves every step of `steps`."""
    with begun(run_of(folder, **settings)) as run:
        for step in steps:
            save(run, step)
            run.log({"loss": step / 10}, step)


def copied(run: TrainingRun) -> None:
    """Wait until the store has what was saved."""
    copies = run._copies
    assert copies is not None
    with copies._changed:
        assert copies._changed.wait_for(copies._is_idle, 60.0)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def remote_steps(url: str = URL) -> list[int]:
    return [manifest.step for manifest in RemoteStore(url).checkpoints()]


def fails(*operations: str, at: str = "", times: int = 10**9) -> Callable[[str, str], None]:
    """A fault that raises as a store without permission does."""
    left = [times]

    def fault(operation: str, path: str) -> None:
        if operation in operations and at in path and left[0] > 0:
            left[0] -= 1
            raise PermissionError("403 Forbidden")

    return fault


@pytest.mark.parametrize(("cls", "protocol"), [(PPOConfig, "memory"), (SFTConfig, "file"), (DPOConfig, "faulty")])
def test_an_empty_folder_resumes_from_the_store(tmp_path: Path, cls: type, protocol: str) -> None:
    url = f"file://{tmp_path}/store/run" if protocol == "file" else f"{protocol}://bucket/run"
    with begun(run_of(tmp_path / "a", cls=cls, url=url)) as first:
        for step in (1, 2, 3):
            if step != 3:
                save(first, step)
            first.log({"loss": step / 10}, step)
    assert remote_steps(url) == [1, 2]
    with run_of(tmp_path / "b", cls=cls, url=url) as second:
        assert second.claim() == (2, tmp_path / "b" / "global_step_2")
        assert contents(tmp_path / "b" / "global_step_2") == contents(tmp_path / "a" / "global_step_2")
        assert (tmp_path / "b" / TRACKER).read_text() == "2"
        second.open(2, 4, {"loss": 0.2})
        assert [row["step"] for row in metrics_of(tmp_path / "b")] == [1, 2]
        assert sorted(path.name for path in (tmp_path / "b" / "configs").iterdir())[0] == "001_step_0.yaml"
        save(second, 4)
    assert [folder for folder in (tmp_path / "b").iterdir() if folder.name.startswith(".staging")] == []
    assert read_manifest(tmp_path / "b" / "global_step_4").sequence == 3
    assert remote_steps(url) == [1, 2, 4]
    with run_of(tmp_path / "a", cls=cls, url=url) as older:  # the first machine again: the store has a newer one
        assert older.claim() == (4, tmp_path / "a" / "global_step_4")
    with run_of(tmp_path / "a", cls=cls, url=url) as same:  # nothing is fetched twice
        (tmp_path / "a" / "global_step_4" / "mark").write_text("")
        assert same.claim() == (4, tmp_path / "a" / "global_step_4")
        assert (tmp_path / "a" / "global_step_4" / "mark").exists()
    if protocol == "file":
        assert (tmp_path / "store" / "run").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("cls", PROGRAMS)
def test_the_store_is_pruned_like_the_folder(tmp_path: Path, cls: type) -> None:
    with begun(run_of(tmp_path / "a", cls, **dict.fromkeys(KEEP[cls], 2))) as run:
        for step in range(1, 6):
            save(run, step)
            copied(run)
    assert remote_steps() == [4, 5]
    assert sorted(path.name for path in (tmp_path / "a").glob("global_step_*")) == ["global_step_4", "global_step_5"]
    kept = {name.split("/")[3] for name in FaultyFileSystem.store}
    assert kept == {"global_step_4", "global_step_5", TRACKER}
    train(tmp_path / "a", range(6, 7), cls=cls)
    assert remote_steps() == [4, 5, 6]


def test_a_failing_store_is_tried_again_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with begun(run_of(tmp_path)) as run, planted(fails("put", times=3)):
        save(run, 1)
        copied(run)
        run.log({}, 1)
        assert metrics_of(tmp_path)[-1]["checkpoint/remote_failures"] == 3
        assert metrics_of(tmp_path)[-1]["checkpoint/remote_behind"] == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        f"trainer.default_hdfs_dir={URL}: cannot take global_step_1 (PermissionError: 403 Forbidden)"
    )
    assert f"{URL} takes checkpoints again" in caplog.text
    assert f"the last checkpoint, global_step_1, is at {URL}" in caplog.text
    assert remote_steps() == [1]


def test_files_of_a_failed_attempt_are_not_copied_again(tmp_path: Path) -> None:
    put = []

    def fault(operation: str, path: str) -> None:
        if operation == "put":
            put.append(path.rpartition("global_step_1/")[2])
            if put.count("data.json") == 1 and put[-1] == "data.json":
                raise ConnectionError("reset by peer")

    with planted(fault), begun(run_of(tmp_path)) as run:
        save(run, 1)
    assert remote_steps() == [1]
    assert sorted(put) == sorted([*read_manifest(tmp_path / "global_step_1").files, MANIFEST, "data.json"])


def test_the_end_of_a_run_says_that_its_last_checkpoint_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with begun(run_of(tmp_path, hdfs_wait_s=0.05), 1) as run, planted(fails("put", "pipe")):
        save(run, 1)
        run.log({}, 1)
        run.close()
    assert "the last checkpoint, global_step_1, is not at faulty://bucket/run: trainer.default_hdfs_dir=" in caplog.text
    assert f"It is in {tmp_path}/global_step_1; the same command copies it when it is run again" in caplog.text
    assert verify(tmp_path / "global_step_1") and remote_steps() == []
    assert run_of(tmp_path).is_finished(1)
    assert remote_steps() == [1]


def test_an_interrupted_run_does_not_wait_and_a_failed_one_only_for_a_store_that_works(tmp_path: Path) -> None:
    release = threading.Event()

    def hangs(operation: str, path: str) -> None:
        if operation == "put":
            assert release.wait(60)

    with planted(hangs), pytest.raises(KeyboardInterrupt), begun(run_of(tmp_path / "stopped")) as run:
        save(run, 1)
        raise KeyboardInterrupt
    release.set()
    with pytest.raises(RuntimeError, match="no memory"), begun(run_of(tmp_path / "failed")) as run:
        with planted(fails("put")):
            save(run, 1)
            copies = run._copies
            assert copies is not None
            with copies._changed:
                assert copies._changed.wait_for(lambda: copies._num_failures > 0, 60.0)
            copies.__exit__(RuntimeError, None, None)
        raise RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"), begun(run_of(tmp_path / "works", url=f"{URL}2")) as run:
        save(run, 2)
        raise RuntimeError("no memory")
    assert remote_steps(f"{URL}2") == [2]


def test_a_slow_store_gets_the_newest_and_delays_no_save(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def slow(operation: str, path: str) -> None:
        if operation == "put":
            entered.set()
            assert release.wait(60)

    with planted(slow), begun(run_of(tmp_path, max_ckpt_to_keep=1)) as run:
        save(run, 1)
        assert entered.wait(60)
        for step in (2, 3, 4):
            save(run, step)
        assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_1", "global_step_4"]
        run.log({}, 4)
        assert metrics_of(tmp_path)[-1]["checkpoint/remote_behind"] == 4
        assert remote_steps() == []
        release.set()
    assert remote_steps() == [4]
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_4"]


def corrupt(path: str) -> None:
    """Flip a byte of a file at the store."""
    remote = fsspec.filesystem("faulty")
    (name,) = [name for name in FaultyFileSystem.store if name.endswith(path)]
    content = bytearray(remote.cat_file(name))
    content[0] ^= 1
    remote.pipe_file(name, bytes(content))


def test_a_corrupt_remote_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", range(1, 4))
    corrupt("global_step_3/actor/shards/0.bin")
    fsspec.filesystem("faulty").rm("/bucket/run/global_step_2/data.json")
    with begun(run_of(tmp_path / "b")) as run:
        assert run.last_checkpoint == tmp_path / "b" / "global_step_1"
        assert (
            f"{URL}/global_step_3/actor/shards/0.bin is corrupt: its checksum differs from upload.json" in caplog.text
        )
        assert f"{URL}/global_step_2: a file is missing" in caplog.text
        save(run, 2, "again")
    assert read_manifest(tmp_path / "b" / "global_step_2").sequence == 4
    with run_of(tmp_path / "c") as third:
        assert third.claim() == (2, tmp_path / "c" / "global_step_2")
        assert (tmp_path / "c" / "global_step_2/actor/shards/0.bin").read_text() == "again 2"


def test_all_remote_checkpoints_corrupt(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 2))
    corrupt("global_step_1/data.json")
    with (
        run_of(tmp_path / "b") as run,
        pytest.raises(ValueError, match=r"all checkpoints are damaged: .*data\.json is"),
    ):
        run.claim()
    assert not list((tmp_path / "b").glob("*global_step*"))
    with run_of(tmp_path / "b", resume_mode="disable") as run:
        assert run.claim() is None
    path = {"resume_mode": "resume_path", "resume_from_path": f"{URL}/global_step_1"}
    with (
        run_of(tmp_path / "b", **path) as run,
        pytest.raises(ValueError, match=r"resume_from_path=.* is damaged: .*data"),
    ):
        run.claim()
    with run_of(tmp_path / "a") as intact:  # the local one is as new
        assert intact.claim() == (1, tmp_path / "a" / "global_step_1")


def test_damaged_local_checkpoints_are_replaced_by_remote_ones(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3))
    for step in (1, 2):
        (tmp_path / f"global_step_{step}" / "data.json").write_text("{")
    with run_of(tmp_path) as run:
        assert run.claim() == (2, tmp_path / "global_step_2")
    assert verify(tmp_path / "global_step_2")


def test_a_store_that_stores_other_bytes_is_found_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def cut(operation: str, path: str) -> bytes | None:
        return b"half" if operation == "put" and path.endswith("0.bin") else None

    with begun(run_of(tmp_path, hdfs_wait_s=0.05)) as run, planted(cut):
        save(run, 1)
        run.close()
    assert "actor/shards/0.bin has 4 bytes there, but 9 here" in caplog.text
    assert remote_steps() == []


@pytest.mark.parametrize(
    "at",
    [
        "data.json",
        *(pytest.param(name, marks=pytest.mark.slow) for name in (UPLOAD, MANIFEST, "run_files/metrics.jsonl")),
    ],
)
def test_a_copy_that_died_is_not_resumed_and_is_removed_later(tmp_path: Path, at: str) -> None:
    train(tmp_path / "a", range(1, 2))
    dies = fails("put", "pipe", at=f"global_step_2/{at}")
    with begun(run_of(tmp_path / "a", hdfs_wait_s=0.02)) as run, planted(dies):
        save(run, 2)
        run.close()
    shutil.rmtree(tmp_path / "a")
    assert remote_steps() == [1]
    with begun(run_of(tmp_path / "b")) as run:
        assert run.last_checkpoint == tmp_path / "b" / "global_step_1"
        save(run, 3)
    assert remote_steps() == [1, 3]
    assert not [name for name in FaultyFileSystem.store if "global_step_2" in name]


def test_late_listings_do_not_hide_the_last_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 3))

    def stale(operation: str, path: str) -> list[str] | None:
        return ["/bucket/run/global_step_1", "/bucket/run/global_step_9"] if operation == "ls" else None

    with planted(stale):
        assert remote_steps() == [1, 2]


def test_the_store_must_answer_at_the_start_of_a_run_without_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with planted(fails("ls")):
        for mode in ("auto", "disable"):
            with (
                run_of(tmp_path / mode, resume_mode=mode) as run,
                pytest.raises(StoreError, match=r"trainer\.default_hdfs_dir=.*403.*remove trainer\.default_hdfs_dir"),
            ):
                run.claim()
    with planted(fails("ls", times=2)), run_of(tmp_path / "auto") as run:  # tried again
        assert run.claim() is None
    train(tmp_path / "run", range(1, 3))
    with planted(fails("ls")), begun(run_of(tmp_path / "run")) as run:
        assert run.last_checkpoint == tmp_path / "run" / "global_step_2"
        assert "the run goes on with its local checkpoints" in caplog.text
    train(tmp_path / "elsewhere", range(3, 4))
    with planted(fails("get")):
        with run_of(tmp_path / "new") as run, pytest.raises(StoreError, match="global_step_3 cannot be fetched"):
            run.claim()
        with run_of(tmp_path / "run") as run:
            assert run.claim() == (2, tmp_path / "run" / "global_step_2")
            assert f"resuming from {tmp_path}/run/global_step_2" in caplog.text


def test_a_run_that_starts_over_is_the_newest_at_the_store(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 6))
    train(tmp_path / "b", range(1, 3), resume_mode="disable")
    assert remote_steps() == [3, 4, 5, 1, 2]
    with run_of(tmp_path / "c") as run:
        assert run.claim() == (2, tmp_path / "c" / "global_step_2")


def test_resume_from_a_url(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 4))
    path: dict[str, Any] = {"resume_mode": "resume_path", "resume_from_path": f"{URL}/global_step_2"}
    with run_of(tmp_path / "b", **path) as run:
        assert run.claim() == (2, tmp_path / "b" / "global_step_2")
        assert [row["step"] for row in metrics_of(tmp_path / "b")] == [1]
        run.open(2, 99, {})
        save(run, 3, "again")
    assert read_manifest(tmp_path / "b" / "global_step_3").sequence == 4
    with run_of(tmp_path / "newest") as run:
        assert run.claim() == (3, tmp_path / "newest" / "global_step_3")
        assert (tmp_path / "newest/global_step_3/actor/shards/0.bin").read_text() == "again 3"
    with run_of(tmp_path / "b", **path) as again:
        assert again.claim() == (2, tmp_path / "b" / "global_step_2")
    with run_of(tmp_path / "other", url=None, **path) as other:  # of another run: without its metrics
        assert other.claim() == (2, tmp_path / "other" / "global_step_2")
        assert not (tmp_path / "other" / "metrics.jsonl").exists()
    train(tmp_path / "c", range(2, 3), url=None)
    with (
        run_of(tmp_path / "c", **path) as taken,
        pytest.raises(ValueError, match="is another checkpoint of the same step"),
    ):
        taken.claim()
    for name, message in {"global_step_8": "is not a complete checkpoint", "best": "must be global_step_N"}.items():
        path["resume_from_path"] = f"{URL}/{name}"
        with run_of(tmp_path / "d", **path) as run, pytest.raises(ValueError, match=message):
            run.claim()


def test_folders_of_others_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remote = fsspec.filesystem("faulty")
    remote.pipe("/bucket/run/global_step_2/actor/model_world_size_8_rank_0.pt", b"theirs")
    with begun(run_of(tmp_path, max_ckpt_to_keep=1, hdfs_wait_s=0.2)) as run:
        for step in (1, 2):
            save(run, step)
            if step == 1:
                copied(run)
    assert "global_step_2 has files but no upload.json" in caplog.text
    train(tmp_path, range(3, 4), max_ckpt_to_keep=1)
    assert remote_steps() == [3]
    theirs = [name for name in FaultyFileSystem.store if "global_step_2" in name]
    assert theirs == ["/bucket/run/global_step_2/actor/model_world_size_8_rank_0.pt"]


def test_a_step_that_is_saved_again_replaces_all_files(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 3))
    store = RemoteStore(URL)
    local = CheckpointStore(tmp_path / "b")
    local.least_sequence = 9
    folder = local.save(2, lambda folder: (folder / "config.yaml").write_text("{}") and None)
    store.upload(folder, {}, set())
    assert [(one.step, one.sequence) for one in store.checkpoints()] == [(1, 1), (2, 9)]
    names = {name.rpartition("global_step_2/")[2] for name in FaultyFileSystem.store if "global_step_2/" in name}
    assert names == {"config.yaml", MANIFEST, UPLOAD}
    assert store.newest_sequence == 9


def test_another_experiment_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 2))
    with planted(fails("get")), run_of(tmp_path / "b", model="other") as run, pytest.raises(ValueError, match=OTHER):
        run.claim()


OTHER = r"trainer\.default_hdfs_dir=faulty://bucket/run has checkpoints of another.*: model\.path was m and is other"


@pytest.mark.parametrize("mode", ["auto", "disable", "resume_path"])
def test_another_experiment_is_refused_whatever_is_newer(tmp_path: Path, mode: Any) -> None:
    """The local save is the newest, so nothing would be fetched; a copy would replace step 2 and prune step 1."""
    train(tmp_path / "theirs", range(1, 3))
    train(tmp_path / "ours", range(1, 4), url=None, model="other")
    before = dict(FaultyFileSystem.store)
    path = str(tmp_path / "ours/global_step_2") if mode == "resume_path" else None
    run = run_of(tmp_path / "ours", model="other", max_ckpt_to_keep=1, resume_mode=mode, resume_from_path=path)
    with pytest.raises(ValueError, match=OTHER) as refused:
        preflight_remote_store(run.config)
    assert "resume_mode=disable" not in str(refused.value)
    with run, pytest.raises(ValueError, match=OTHER):
        run.claim()
    assert before == FaultyFileSystem.store


@pytest.mark.parametrize("operation", ["ls", "cat"])
def test_another_experiment_is_refused_when_the_store_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    train(tmp_path / "theirs", range(1, 3))
    train(tmp_path / "ours", range(1, 4), url=None, model="other")
    before = {name: file.getvalue() for name, file in FaultyFileSystem.store.items()}
    run = run_of(tmp_path / "ours", model="other", max_ckpt_to_keep=1)
    with planted(fails(operation, at="config.yaml" if operation == "cat" else "")):
        preflight_remote_store(run.config)
        found = run.claim()
    assert found is not None
    with run:
        run.open(found[0], 99, {})
        save(run, 4)
    assert re.search(f"the last checkpoint, global_step_4, is not at {URL}: {OTHER}", caplog.text)
    assert "the same command copies it" not in caplog.text
    assert before == {name: file.getvalue() for name, file in FaultyFileSystem.store.items()}


def test_a_finished_run_does_not_copy_to_another_experiment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "theirs", range(1, 3))
    train(tmp_path / "ours", range(1, 4), url=None, model="other")
    before = dict(FaultyFileSystem.store)
    assert run_of(tmp_path / "ours", model="other", max_ckpt_to_keep=1).is_finished(3)
    assert re.search(f"the last checkpoint, global_step_3, is not at {URL}: {OTHER}", caplog.text)
    assert before == FaultyFileSystem.store


def test_a_newer_save_of_the_same_step_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "here", range(1, 3))
    path = {"resume_mode": "resume_path", "resume_from_path": f"{URL}/global_step_1"}
    train(tmp_path / "there", range(2, 3), **path)  # step 2 again, as the third save
    refused = (
        f"trainer.default_hdfs_dir={URL}: global_step_2 is not copied, because global_step_2 there is not older (save 3; "
        "this one is save 2)"
    )
    assert run_of(tmp_path / "here", max_ckpt_to_keep=1).is_finished(2)
    assert f"the last checkpoint, global_step_2, is not at {URL}: {refused}" in caplog.text
    assert RemoteStore(URL).checkpoints()[-1].sequence == 3
    caplog.clear()
    run = run_of(tmp_path / "here", max_ckpt_to_keep=2)
    with planted(fails("get")):
        assert run.claim() == (2, tmp_path / "here" / "global_step_2")
    with run:
        run.open(2, 99, {})
        copied(run)
        assert refused in caplog.text
        assert [(one.step, one.sequence) for one in RemoteStore(URL).checkpoints()] == [(1, 1), (2, 3)]
        save(run, 3)
    assert [(one.step, one.sequence) for one in RemoteStore(URL).checkpoints()] == [(2, 3), (3, 4)]


def test_saves_after_an_outage_at_the_start_are_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other machine has gone on to step 4 while this one has only step 1 and does not reach the store."""
    caplog.set_level(logging.INFO)
    train(tmp_path / "here", range(1, 2))
    train(tmp_path / "there", range(2, 5))
    with planted(fails("ls", "cat", "put", "pipe")):
        run = begun(run_of(tmp_path / "here", max_ckpt_to_keep=2))
        save(run, 5)
    assert read_manifest(tmp_path / "here" / "global_step_5").sequence == 2
    with run:
        copied(run)
        assert "global_step_5 is not copied, because global_step_4 there is not older (save 4; this" in caplog.text
        assert remote_steps() == [1, 2, 3, 4]
        save(run, 6)
    assert f"the last checkpoint, global_step_6, is at {URL}" in caplog.text
    assert [(one.step, one.sequence) for one in RemoteStore(URL).checkpoints()] == [(4, 4), (6, 5)]


def test_prune_keeps_the_last_copy_and_what_is_newer(tmp_path: Path) -> None:
    train(tmp_path, range(1, 5))
    store = RemoteStore(URL)
    store.prune(1, 2)
    assert remote_steps() == [2, 3, 4]
    store.prune(2, 9)  # not there: nothing is older than it
    assert remote_steps() == [2, 3, 4]
    store.prune(2, 4)
    assert remote_steps() == [3, 4]


def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 2))
    remote = fsspec.filesystem("faulty")
    upload = json.loads(remote.cat_file("/bucket/run/global_step_1/upload.json"))
    upload["files"]["../../evil"] = upload["files"].pop("data.json")
    remote.pipe("/bucket/run/global_step_1/upload.json", json.dumps(upload).encode())
    assert remote_steps() == []


def test_passwords_are_neither_logged_nor_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="lockstep")  # fsspec has its own at this level
    monkeypatch.setenv("STORE", "faulty://me:secret@host/run")
    settings = [*PROGRAMS[SFTConfig], "trainer.hdfs_wait_s=0.05", "trainer.default_hdfs_dir=${oc.env:STORE}"]
    settings.append(f"trainer.default_local_dir={tmp_path}")
    with begun(TrainingRun(load_config(SFTConfig, settings, run_checks=False))) as run:

        def fault(operation: str, path: str) -> None:
            if operation == "put":
                raise PermissionError(f"no access to faulty://me:secret@host/run with secret for {path}")

        with planted(fault):
            save(run, 1)
            run.close()
    assert "trainer.default_hdfs_dir=${oc.env:STORE}: cannot take global_step_1" in caplog.text
    assert "no access to faulty://me:***@host/run with ***" in caplog.text and "secret" not in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    files = [*PROGRAMS[SFTConfig], "trainer.default_hdfs_dir=faulty://me:secret@host/run"]
    with pytest.raises(ConfigError, match=r"default_hdfs_dir=faulty://me:\*\*\*@host/run: has a password") as caught:
        load_config(SFTConfig, files)
    assert "secret" not in str(caught.value)


def test_what_cannot_work_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    model = [f"model.path={tmp_path}/model", f"data.train_files=[{tmp_path}/rows.jsonl]"]

    def problems(*overrides: str) -> list[str]:
        folder = f"trainer.default_local_dir={tmp_path}/run"
        return preflight(load_config(SFTConfig, [*model, folder, *overrides]))

    assert problems(f"trainer.default_hdfs_dir={URL}") == []
    assert list(FaultyFileSystem.store) == []
    (unknown,) = problems("trainer.default_hdfs_dir=s4://bucket/run")
    assert unknown.startswith("trainer.default_hdfs_dir=s4://bucket/run: unknown protocol s4://; fsspec opens s3://")
    (package,) = problems("trainer.default_hdfs_dir=gs://bucket/run")
    assert package == (
        "trainer.default_hdfs_dir=gs://bucket/run: gs:// URLs need a package that is not installed: pip install gcsfs"
    )
    with planted(fails("ls")):
        (closed,) = problems(f"trainer.default_hdfs_dir={URL}")
    assert "403 Forbidden" in closed and "make it available" in closed
    with planted(fails("pipe")):
        (read_only,) = problems(f"trainer.default_hdfs_dir={URL}")
    assert read_only.startswith(f"trainer.default_hdfs_dir={URL}: cannot be written (PermissionError: 403")
    (no_path,) = problems("trainer.resume_mode=resume_path", f"trainer.resume_from_path={URL}/global_step_1")
    assert "is not a complete checkpoint" in no_path


DEADLY = """
import os, signal, sys
from pathlib import Path
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from lockstep.trainer.run.remote_store import RemoteStore

class Deadly(LocalFileSystem):
    num_files = 0
    def put_file(self, path, target, *args, **kwargs):
        Deadly.num_files += 1
        if Deadly.num_files == 3:  # in the middle of the file
            Path(target).write_bytes(Path(path).read_bytes()[:1])
            os.kill(os.getpid(), signal.SIGKILL)
        super().put_file(path, target, *args, **kwargs)

register_implementation("file", Deadly, clobber=True)
RemoteStore(sys.argv[2]).upload(Path(sys.argv[1]), {}, set())
"""


def test_kill_9_during_a_copy(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    train(tmp_path / "a", range(1, 2), url=url)
    train(tmp_path / "a", range(2, 3), url=None)
    killed = subprocess.run([sys.executable, "-c", DEADLY, str(tmp_path / "a" / "global_step_2"), url], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "store" / "global_step_2" / UPLOAD).exists() and remote_steps(url) == [1]
    with run_of(tmp_path / "new", url=url) as run:
        assert run.claim() == (1, tmp_path / "new" / "global_step_1")
    with begun(run_of(tmp_path / "a", url=url)) as run:  # the same machine: its copy is made up for
        assert run.last_checkpoint == tmp_path / "a" / "global_step_2"
    assert remote_steps(url) == [1, 2]
    with run_of(tmp_path / "new2", url=url) as run:
        assert run.claim() == (2, tmp_path / "new2" / "global_step_2")


def same_run(one: Path, other: Path, step: int) -> None:
    """Equal metrics, weights, optimizer, random states and data order, bit for bit."""
    rows = [
        [
            {name: value for name, value in row.items() if not name.startswith(("checkpoint/", "async/"))}
            for row in numbers_of(run)
        ]
        for run in (one, other)
    ]
    assert rows[0] == rows[1] and rows[0][-1]["step"] == step
    states = [contents(run / f"global_step_{step}") for run in (one, other)]
    differ = {name for name in states[0] | states[1] if states[0].get(name) != states[1].get(name)}
    paths_and_times = {"config.yaml", "manifest.json", "trainer_state.json", ".metadata"}
    assert {name.rpartition("/")[2] for name in differ} <= paths_and_times, differ
    assert any(name.endswith(".distcp") for name in states[0])


@pytest.mark.slow
def test_a_ppo_run_resumes_from_the_store_bit_for_bit(overrides: list[str], tmp_path: Path) -> None:
    command = [*overrides, "trainer.save_freq=2", "trainer.test_freq=2", "trainer.total_epochs=2"]
    remote = [*command, f"trainer.default_hdfs_dir=file://{tmp_path}/store", "trainer.max_actor_ckpt_to_keep=2"]
    whole = f"trainer.default_local_dir={tmp_path}/whole"
    assert main_ppo.main([*command, whole, "trainer.total_training_steps=6"]) == 0
    assert main_ppo.main([*remote, "trainer.total_training_steps=4"]) == 0
    assert remote_steps(f"file://{tmp_path}/store") == [2, 4]
    shutil.rmtree(tmp_path / "run")
    assert main_ppo.main([*remote, "trainer.total_training_steps=6"]) == 0
    same_run(tmp_path / "run", tmp_path / "whole", 6)
    assert remote_steps(f"file://{tmp_path}/store") == [4, 6]


@pytest.fixture
def sft(tiny_run_files: Path, tmp_path: Path) -> list[str]:
    rows = [{"question": f"{i % 9}+{i % 4}=", "answer": str(i % 9 + i % 4)} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"model.path={tiny_run_files}/model", f"data.train_files={tmp_path}/pairs.jsonl"]
    sizes = ["data.train_batch_size=4", "data.max_length=64", "trainer.total_epochs=4"]
    return [*files, *sizes, "trainer.device=cpu", "trainer.save_freq=2", "optim.lr_scheduler_type=constant"]


def test_an_sft_run_resumes_from_the_store_bit_for_bit(sft: list[str], tmp_path: Path) -> None:
    remote = [*sft, "trainer.default_hdfs_dir=memory://bucket/sft", "optim.lr_warmup_steps_ratio=0"]
    whole = [*sft, "optim.lr_warmup_steps_ratio=0", f"trainer.default_local_dir={tmp_path}/whole"]
    assert fsdp_sft_trainer.main([*whole, "trainer.total_training_steps=6"]) == 0
    for folder, steps in (("a", 4), ("b", 6)):
        settings = [f"trainer.default_local_dir={tmp_path}/{folder}", f"trainer.total_training_steps={steps}"]
        assert fsdp_sft_trainer.main([*remote, *settings]) == 0
    same_run(tmp_path / "b", tmp_path / "whole", 6)
    assert remote_steps("memory://bucket/sft") == [2, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
def test_a_killed_run_goes_on_elsewhere(overrides: list[str], tmp_path: Path, mode: str) -> None:
    """Killed when the copy of step 4 has begun, which may or may not be complete."""
    command = [*overrides, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.save_freq=1"]
    command += ["trainer.total_training_steps=6", "trainer.val_before_train=false"]
    command += ["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"]
    if mode == "one_step_off":
        command += ["trainer.async_mode=one_step_off", "trainer.controller=local", "trainer.placement=split"]
        command += ["trainer.n_gpus_per_node=2"]
    store = tmp_path / "store"
    remote = [*command, f"trainer.default_hdfs_dir=file://{store}"]
    assert main_ppo.main([*command, f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    program = Program("lockstep.trainer.main_ppo", remote, tmp_path)
    assert program.until((store / "global_step_4" / UPLOAD).exists), program.stderr
    program.signal(signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    shutil.rmtree(tmp_path / "run")
    assert main_ppo.main(remote) == 0
    if mode == "synchronous":
        same_run(tmp_path / "run", tmp_path / "whole", 6)
    else:  # its metrics have times that no comparison leaves out
        trained = trained_groups(tmp_path / "run")
        assert list(trained) == list(range(1, 7)) and trained == trained_groups(tmp_path / "whole")


@pytest.mark.slow
def test_a_store_that_fails_changes_nothing(overrides: list[str], tmp_path: Path) -> None:
    command = [*overrides, "trainer.save_freq=1", "trainer.total_training_steps=3"]
    assert main_ppo.main([*command, f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    with planted(fails("put")):
        assert main_ppo.main([*command, f"trainer.default_hdfs_dir={URL}", "trainer.hdfs_wait_s=0.1"]) == 0
    same_run(tmp_path / "run", tmp_path / "whole", 3)
    assert metrics_of(tmp_path / "run")[-1]["checkpoint/remote_failures"] > 0
    assert remote_steps() == []
    assert main_ppo.main([*command, f"trainer.default_hdfs_dir={URL}"]) == 0  # nothing to do but the copy
    assert remote_steps() == [3]
