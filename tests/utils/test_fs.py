"""Copies of remote files: complete or absent, made once, and made again when the remote file changes."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from lockstep.utils.fs import check_protocol, copy_to_local, default_cache, is_remote

FILES = {"config.json": b"{}", "sub/weights.bin": b"w" * 1000}


@pytest.fixture
def remote() -> Iterator[Any]:
    """An empty in-memory file system."""
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/", recursive=True)


@pytest.fixture
def url(remote: Any) -> str:
    for name, content in FILES.items():
        remote.pipe(f"/bucket/model/{name}", content)
    return "memory://bucket/model"


def contents(folder: str) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def test_local_paths_are_returned_as_they_are(tmp_path: Path) -> None:
    assert copy_to_local(tmp_path) == str(tmp_path)
    assert copy_to_local(f"file://{tmp_path}") == str(tmp_path)
    assert copy_to_local("org/name") == "org/name"
    assert not is_remote(tmp_path) and not is_remote("file:///x") and not is_remote("org/name")
    assert is_remote("s3://bucket/x") and is_remote("hdfs://host:9000/x")


def test_folder_and_file_are_copied_once(
    url: str, remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_to_local(url, cache_dir=tmp_path)
    assert Path(copy).name == "model" and contents(copy) == FILES
    single = copy_to_local(f"{url}/config.json", cache_dir=tmp_path, verbose=True)
    assert Path(single).name == "config.json" and Path(single).read_bytes() == b"{}"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get", None)
        assert copy_to_local(url, cache_dir=tmp_path) == copy
    (Path(copy) / "config.json").write_bytes(b"damaged")
    assert contents(copy_to_local(url, cache_dir=tmp_path, always_recopy=True)) == FILES


def test_changed_content_gets_a_new_copy(url: str, remote: Any, tmp_path: Path) -> None:
    old = copy_to_local(url, cache_dir=tmp_path)
    remote.pipe("/bucket/model/config.json", b"[]")
    new = copy_to_local(url, cache_dir=tmp_path)
    assert contents(new)["config.json"] == b"[]"
    assert contents(old) == FILES  # a running job may read it


def test_interrupted_copy_is_never_used(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, remote: list[str], local: list[str], **kwargs: Any) -> None:
        Path(local[0]).write_bytes(b"{")
        raise ConnectionError("connection lost")

    def cut(self: Any, remote: list[str], local: list[str], **kwargs: Any) -> None:
        for path in local:
            Path(path).write_bytes(b"{")

    for broken, message in ((fail, "cannot be copied to .*connection lost"), (cut, "1 bytes, expected 2")):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
            patch.setattr(MemoryFileSystem, "get", broken)
            copy_to_local(url, cache_dir=tmp_path)
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".file.lock"]
    (folder,) = tmp_path.glob("*/*/")
    (folder / ".model.1234abcd.tmp").mkdir()  # left by a killed process
    assert contents(copy_to_local(url, cache_dir=tmp_path)) == FILES
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_processes_share_one_copy(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "remote.zip", "w") as archive:
        for name, content in FILES.items():
            archive.writestr(f"model/{name}", content)
    script = (
        "import logging, sys; logging.basicConfig(level=20)\n"
        "from lockstep.utils.fs import copy_to_local\n"
        "print(copy_to_local(sys.argv[1], cache_dir=sys.argv[2], filelock='.own.lock'))\n"
    )
    command = [sys.executable, "-c", script, f"zip://model::{tmp_path}/remote.zip", str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in running]
    assert all(process.returncode == 0 for process in running), outputs
    (copy,) = {printed.strip() for printed, _ in outputs}
    assert contents(copy) == FILES
    assert sum("copying" in logged for _, logged in outputs) == 1


def test_problems_are_one_sentence(remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        known_implementations, "absent", {"class": "absentfs.AbsentFileSystem", "err": "Install absentfs"}
    )
    with pytest.raises(
        ValueError, match=r"^absent:// URLs need a package that is not installed: pip install absentfs$"
    ):
        copy_to_local("absent://bucket/x", cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^unknown protocol s4://; fsspec opens s3://"):
        check_protocol("s4://bucket/x")
    with pytest.raises(ValueError, match=r"^memory://nowhere: no such file or folder$"):
        copy_to_local("memory://nowhere", cache_dir=tmp_path)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("LOCKSTEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "lockstep"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_copy_to_memory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    copy = copy_to_local(tmp_path / "model", use_shm=True)
    try:
        assert copy.startswith("/dev/shm/") and contents(copy) == {"config.json": b"{}"}
    finally:
        shutil.rmtree(Path(copy).parents[1])
