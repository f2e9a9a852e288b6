"""Atomic writes, syncing, checksums and the writability check."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from lockstep.utils.files import (
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    atomic_writer,
    did_you_mean_path,
    ensure_writable,
    fsync_tree,
    sha256,
)
from lockstep.utils.timing import marked_timer


def test_atomic_writes_replace_the_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write_text(path, "old")
    atomic_write_text(path, "grün")
    assert path.read_text(encoding="utf-8") == "grün"
    atomic_write_bytes(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    atomic_write_json(path, {"a": [1, "ü"]})
    assert json.loads(path.read_text()) == {"a": [1, "ü"]}
    assert os.listdir(tmp_path) == ["file"]


def test_failed_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write_text(path, "old")
    with pytest.raises(RuntimeError), atomic_writer(path) as file:
        file.write(b"half of the n")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_json_rejects_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        atomic_write_json(tmp_path / "file", float("nan"))
    assert os.listdir(tmp_path) == []


def test_file_and_folder_are_synced_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    atomic_write_text(tmp_path / "file", "text")
    assert events == ["file", "rename", "folder"]


def test_fsync_tree_syncs_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/deep").write_text("1")
    (tmp_path / "top").write_text("2")
    (tmp_path / "link").symlink_to("nowhere")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    fsync_tree(tmp_path)
    expected = [tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/deep", tmp_path / "top"]
    assert sorted(synced) == sorted(str(path.resolve()) for path in expected)


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc" * 100_000)
    assert sha256(tmp_path / "file") == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_ensure_writable_creates_an_empty_folder(tmp_path: Path) -> None:
    assert ensure_writable(tmp_path / "a/b", "trainer.default_local_dir") == tmp_path / "a/b"
    assert os.listdir(tmp_path / "a/b") == []


def test_ensure_writable_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"trainer\.default_local_dir=.*file/sub: cannot write there \(Not a directory\)"
    ):
        ensure_writable(tmp_path / "file/sub", "trainer.default_local_dir")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_ensure_writable_rejects_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match=r"Permission denied\); set trainer\.default_local_dir"):
        ensure_writable(tmp_path, "trainer.default_local_dir")


def test_marked_timer_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    timing_raw: dict[str, float] = {}
    with marked_timer("gen", timing_raw):
        pass
    with pytest.raises(RuntimeError), marked_timer("gen", timing_raw):
        raise RuntimeError
    assert timing_raw == {"gen": 3.5}


def test_a_misspelt_path_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "models" / "qwen2.5-0.5b").mkdir(parents=True)
    for name in ("train.parquet", "broken.parquet", "reward.py"):
        (tmp_path / name).touch()
    cases = {
        "trian.parquet": "train.parquet",
        "train.jsonl": "train.parquet",
        "rewards.py": "reward.py",
        "modles/qwen2.5-0.5b": "models/qwen2.5-0.5b",
        "models/qwen2.5-0.5": "models/qwen2.5-0.5b",
        "absent.parquet": None,
        "nowhere/at/all": None,
    }
    for written, meant in cases.items():
        assert did_you_mean_path(tmp_path / written) == (f" (did you mean {tmp_path / meant}?)" if meant else "")
