"""The checkpoint store: saves are found again, and a crash at any time loses at most the save in progress."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.trainer.run.checkpoint import LOCK, TRACKER, CheckpointStore, RunLock, verify
from lockstep.utils.checkpoint_folder import MANIFEST
from lockstep.utils.files import sha256

REPOSITORY = Path(__file__).parents[2]
DEAD_PID = 4_194_305  # above Linux's maximum


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor/model.bin").write_text(text)
        (folder / "data.json").write_text(json.dumps({"text": text}))

    return write


def model_of(folder: Path) -> str:
    return (folder / "actor/model.bin").read_text()


def hidden(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith("."))


def steps_in(root: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("global_step_")) for folder in root.glob("global_step_*"))


def test_save_writes_files_manifest_and_tracker(tmp_path: Path) -> None:
    root = tmp_path / "run"
    folder = CheckpointStore(root).save(7, writer("weights"))
    assert folder == root / "global_step_7"
    assert model_of(folder) == "weights"
    assert (root / TRACKER).read_text() == "7"
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["step"] == 7
    assert manifest["files"] == {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in ("actor/model.bin", "data.json")
    }
    assert hidden(root) == []


def test_auto_finds_the_newest_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.find("auto", None) is None
    store.save(9, writer("nine"))
    store.save(10, writer("ten"))
    assert store.find("auto", None) == (10, tmp_path / "global_step_10")
    assert store.find("disable", None) is None


def test_newest_save_is_resumed_not_the_largest_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    for step in (5, 20, 6):
        store.save(step, writer(str(step)))
    assert store.find("auto", None) == (6, tmp_path / "global_step_6")
    assert not caplog.records


def test_complete_checkpoint_newer_than_the_tracker_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, writer("one"))
    store.save(2, writer("two"))
    (tmp_path / TRACKER).write_text("1")
    assert store.find("auto", None) == (2, tmp_path / "global_step_2")
    assert "says step 1, but the newest complete checkpoint is" in caplog.text
    assert "trainer.resume_from_path" in caplog.text


def damage_by(kind: str, folder: Path) -> None:
    model = folder / "actor/model.bin"
    if kind == "no manifest":
        (folder / MANIFEST).unlink()
    elif kind == "half a manifest":
        (folder / MANIFEST).write_text('{"step": 2, "fil')
    elif kind == "a list for a manifest":
        (folder / MANIFEST).write_text("[]")
    elif kind == "file missing":
        model.unlink()
    elif kind == "file cut":
        model.write_text("tw")
    elif kind == "file changed":
        model.write_text("TWO")
    elif kind == "folder gone":
        shutil.rmtree(folder)


DAMAGES = {
    "no manifest": r"manifest\.json is missing",
    "half a manifest": r"manifest\.json is not a checkpoint manifest",
    "a list for a manifest": r"manifest\.json is not a checkpoint manifest",
    "file missing": r"actor/model\.bin is missing",
    "file cut": r"actor/model\.bin has 2 bytes, but its manifest says 3",
    "file changed": r"actor/model\.bin is corrupt: its checksum differs",
}


@pytest.mark.parametrize("kind", [*DAMAGES, "folder gone"])
def test_auto_skips_a_damaged_checkpoint_with_a_warning(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, writer("one"))
    damage_by(kind, store.save(2, writer("two")))
    assert store.find("auto", None) == (1, tmp_path / "global_step_1")
    assert "says step 2, but the newest complete checkpoint is" in caplog.text
    if kind in DAMAGES:
        assert "skipping checkpoint" in caplog.text and "global_step_2" in caplog.text


@pytest.mark.parametrize(("kind", "message"), DAMAGES.items())
def test_resume_path_refuses_a_damaged_checkpoint(kind: str, message: str, tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(2, writer("two"))
    damage_by(kind, folder)
    with pytest.raises(ValueError, match=r"trainer\.resume_from_path=.*global_step_2 is damaged: .*" + message):
        CheckpointStore(tmp_path / "other").find("resume_path", str(folder))


def test_auto_raises_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    damage_by("file cut", store.save(2, writer("two")))
    with pytest.raises(ValueError, match=r"all checkpoints are damaged: global_step_2 .*trainer\.resume_mode=disable"):
        store.find("auto", None)


def test_tracker_without_checkpoints_starts_at_0_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / TRACKER).write_text("5")
    assert CheckpointStore(tmp_path).find("auto", None) is None
    assert "says step 5, but there is no checkpoint" in caplog.text


@pytest.mark.parametrize("content", ["1", "9", "", "x"])
def test_stale_tracker_is_mended(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    store.save(2, writer("two"))
    (tmp_path / TRACKER).write_text(content)
    found = store.find("auto")
    assert found is not None
    store.mend_tracker(found[0])
    assert (tmp_path / TRACKER).read_text() == "2"
    caplog.clear()
    assert store.find("auto") == found and not caplog.records
    store.mend_tracker(None)
    assert not (tmp_path / TRACKER).exists()


def test_resume_path(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path / "a").save(3, writer("three"))
    store = CheckpointStore(tmp_path / "b")
    assert store.find("resume_path", f"{folder}/") == (3, folder)
    with pytest.raises(ValueError, match=r"trainer\.resume_mode=resume_path needs trainer\.resume_from_path"):
        store.find("resume_path", None)
    with pytest.raises(ValueError, match="the folder name must be global_step_N"):
        store.find("resume_path", str(tmp_path / "a"))
    with pytest.raises(ValueError, match="no such folder"):
        store.find("resume_path", str(tmp_path / "a/global_step_4"))
    renamed = folder.rename(tmp_path / "a/global_step_30")
    with pytest.raises(ValueError, match="is for step 3, but the folder is global_step_30"):
        store.find("resume_path", str(renamed))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(4, writer("first"))
    folder = store.save(4, writer("second"))
    verify(folder)
    assert model_of(folder) == "second"
    assert steps_in(tmp_path) == [4] and hidden(tmp_path) == []


def test_keep_prunes_the_oldest_saves(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / "global_step_1").mkdir()  # without a manifest: not made by the store
    for step in (10, 20, 30):
        store.save(step, writer(str(step)))
    assert steps_in(tmp_path) == [1, 20, 30]
    store.save(5, writer("back"))
    assert steps_in(tmp_path) == [1, 5, 30]
    CheckpointStore(tmp_path, keep=1).save(6, writer("six"))
    assert steps_in(tmp_path) == [1, 6]
    assert hidden(tmp_path) == []
    with pytest.raises(ValueError, match=r"trainer\.max_actor_ckpt_to_keep=0"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize(
    ("code", "kind", "fix"),
    [(errno.ENOSPC, OSError, "free some space"), (errno.EACCES, PermissionError, "make it writable")],
)
def test_file_system_errors_name_the_key(code: int, kind: type[OSError], fix: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    earlier = store.save(1, writer("one"))

    def fail(folder: Path) -> None:
        writer("half")(folder)
        raise OSError(code, os.strerror(code))

    with pytest.raises(kind, match=rf"cannot save global_step_2 in trainer\.default_local_dir=.*{fix}") as caught:
        store.save(2, fail)
    assert caught.value.errno == code
    verify(earlier)
    assert steps_in(tmp_path) == [1] and hidden(tmp_path) == []
    assert (tmp_path / TRACKER).read_text() == "1"


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt()])
def test_other_errors_are_raised_and_leave_no_staging(error: BaseException, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        writer("half")(folder)
        raise error

    with pytest.raises(type(error)) as caught:
        CheckpointStore(tmp_path).save(2, fail)
    assert caught.value is error
    assert os.listdir(tmp_path) == []


def test_failed_rename_restores_the_replaced_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.save(1, writer("old"))
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if ".staging" in str(source):
            raise OSError(errno.EIO, "broken disk")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match=r"trainer\.default_local_dir"):
        store.save(1, writer("new"))
    verify(folder)
    assert model_of(folder) == "old" and hidden(tmp_path) == []


def test_full_disk_reported_by_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    def fail(folder: Path) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file")

    with pytest.raises(OSError, match="No space left on device; free some space") as caught:
        CheckpointStore(tmp_path).save(1, fail)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mount_point = tmp_path / "tiny"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount_point)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting is not allowed here")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


def test_full_disk(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk)
    earlier = store.save(1, writer("x" * 50_000))
    with pytest.raises(OSError, match=r"cannot save global_step_2 in trainer\.default_local_dir=.*No space left"):
        store.save(2, writer("x" * 500_000))
    verify(earlier)
    assert hidden(tiny_disk) == []
    assert store.find("auto", None) == (1, earlier)
    store.save(3, writer("x" * 1000))
    assert store.find("auto", None) == (3, tiny_disk / "global_step_3")


def run_child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


DYING_CHILD = """
    import os, shutil, signal, sys
    from pathlib import Path
    from lockstep.trainer.run import checkpoint

    root, moment, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def write(folder):
        (folder / "actor").mkdir()
        with open(folder / "actor/model.bin", "w") as file:
            file.write("child" * 1000)
            if moment == "during write":
                file.flush()
                die()
        (folder / "data.json").write_text("{}")

    real_rename, real_write_json, real_write_text = os.rename, checkpoint.atomic_write_json, checkpoint.atomic_write_text
    real_rmtree = shutil.rmtree

    def rename(source, target):
        staging = ".staging" in str(source)
        if staging and moment in ("before rename", "old moved aside"):
            die()
        real_rename(source, target)
        if staging and moment == "after rename":
            die()

    def write_json(*arguments):
        if moment == "before manifest":
            die()
        real_write_json(*arguments)

    def write_text(*arguments):
        if moment == "before tracker":
            die()
        real_write_text(*arguments)

    def rmtree(folder, **options):
        if moment == "during prune" and ".pruned" in str(folder):
            os.unlink(folder / "manifest.json")
            die()
        real_rmtree(folder, **options)

    os.rename, shutil.rmtree = rename, rmtree
    checkpoint.atomic_write_json, checkpoint.atomic_write_text = write_json, write_text
    with checkpoint.RunLock(root):
        checkpoint.CheckpointStore(root, keep=2).save(step, write)
"""


@pytest.mark.parametrize(
    ("moment", "step", "found", "content"),
    [
        ("during write", 3, 2, "two"),
        ("before manifest", 3, 2, "two"),
        ("before rename", 3, 2, "two"),
        ("after rename", 3, 3, "child" * 1000),
        ("before tracker", 3, 3, "child" * 1000),
        ("during prune", 3, 3, "child" * 1000),
        ("old moved aside", 2, 2, "two"),
        ("after rename", 2, 2, "child" * 1000),
    ],
)
def test_killed_at_any_time(moment: str, step: int, found: int, content: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, writer("one"))
    store.save(2, writer("two"))
    child = run_child(DYING_CHILD, tmp_path, moment, step)
    assert child.returncode == -signal.SIGKILL, child.stderr

    with RunLock(tmp_path):
        store.clean_stale()
        assert hidden(tmp_path) == [LOCK]
        resumed = store.find("auto", None)
        assert resumed == (found, tmp_path / f"global_step_{found}")
        assert model_of(resumed[1]) == content
        store.save(found + 1, writer("next"))
        assert store.find("auto", None) == (found + 1, tmp_path / f"global_step_{found + 1}")


def test_clean_stale_removes_what_any_process_left_behind(tmp_path: Path) -> None:
    pids = (DEAD_PID, os.getppid(), os.getpid())  # an id may belong to another live process by now
    (tmp_path / ".writable-0123_abc").write_text("")
    for pid in pids:
        for kind in ("staging", "pruned", "replaced"):
            (tmp_path / f".{kind}-global_step_9-{pid}").mkdir()
        (tmp_path / f".config.yaml.{pid}-0123abcd.tmp").write_text("half")
    kept = [".staging-notes", "global_step_9", ".mine.tmp", "config.yaml", "notes.tmp"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / f"configs/.001_step_0.yaml.{DEAD_PID}-0123abcd.tmp").write_text("half")
    CheckpointStore(tmp_path).clean_stale()
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "configs"]) and os.listdir(tmp_path / "configs") == []
    CheckpointStore(tmp_path / "not there").clean_stale()


@pytest.mark.parametrize("pid", [DEAD_PID, os.getppid()])
def test_clean_stale_restores_a_replaced_checkpoint(pid: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.save(1, writer("one"))
    folder.rename(tmp_path / f".replaced-global_step_1-{pid}")
    store.clean_stale()
    assert store.find("auto", None) == (1, folder)
    assert "restoring the previous one" in caplog.text


HOLDING_CHILD = """
    import os, sys, time
    from pathlib import Path
    from lockstep.trainer.run.checkpoint import RunLock

    lock = RunLock(Path(sys.argv[1]))
    lock.acquire()
    if sys.argv[2] == "fork" and os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    if sys.argv[2] != "fork":
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


def start_holder(root: Path, mode: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", textwrap.dedent(HOLDING_CHILD), str(root), mode]
    holder = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    return holder, int(holder.stdout.readline())


def test_a_folder_in_place_of_the_lock_file_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ValueError, match=r"trainer\.default_local_dir=.*cannot open the lock file"):
        RunLock(tmp_path).acquire()


def test_lock_refuses_a_second_live_run_but_not_after_a_kill(tmp_path: Path) -> None:
    holder, _ = start_holder(tmp_path, "alone")
    try:
        with pytest.raises(
            ValueError, match=rf"trainer\.default_local_dir=.* is in use by a live run \(pid {holder.pid} on "
        ):
            RunLock(tmp_path).acquire()
    finally:
        holder.kill()
        holder.communicate()
    with RunLock(tmp_path), pytest.raises(ValueError, match=f"pid {os.getpid()} "):
        RunLock(tmp_path).acquire()
    RunLock(tmp_path).acquire()


def test_orphan_of_a_killed_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    holder, orphan = start_holder(tmp_path, "fork")
    try:
        with pytest.raises(ValueError, match=f"pid {holder.pid} "):
            RunLock(tmp_path).acquire()
        holder.kill()
        holder.wait()
        with RunLock(tmp_path):
            os.kill(orphan, 0)
    finally:
        os.kill(orphan, signal.SIGKILL)
        holder.communicate()


def test_lock_in_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"trainer\.default_local_dir=.*cannot write there"):
        RunLock(tmp_path / "file/run").acquire()
