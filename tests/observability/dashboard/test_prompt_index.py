"""The index of prompts: histories, incremental filling, restarts, damage, and two dashboards at once."""

import json
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.observability.dashboard import prompt_index
from lockstep.observability.dashboard.prompt_index import PromptIndex
from lockstep.observability.rollout_files import dumps_in
from lockstep.observability.rollout_table import read_table


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_index, "START_DELAY_S", 0.0)


def dump(folder: Path, step: int, scores: Mapping[str, list[float]]) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [
        {"input": prompt, "output": "a", "score": score, "uid": f"{place}", "index": 1, "step": step}
        for place, (prompt, values) in enumerate(scores.items())
        for score in values
    ]
    path = folder / f"{step}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def key_of(path: Path, prompt: str) -> str:
    return next(group.key for group in read_table(path).groups if group.prompt == prompt)


def fill(index: PromptIndex, folder: Path) -> None:
    index.fill(lambda: {"train": dumps_in(folder)}).join(30)


def history(index: PromptIndex, key: str) -> list[tuple[int, int, float, float]]:
    return [(step, number, stats.mean, stats.pass_rate) for step, number, stats in index.history("train", key)]


def is_in_memory(index: PromptIndex) -> bool:
    return not index._query("PRAGMA database_list")[0][2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dump(tmp_path / "dumps", 1, {"p": [0.0, 0.0], "q": [1.0]})
    dump(tmp_path / "dumps", 2, {"q": [1.0], "p": [0.0, 1.0]})
    return tmp_path / "dumps"


def test_a_prompt_over_the_steps(folder: Path) -> None:
    index = PromptIndex(folder)
    fill(index, folder)
    assert index.num_steps("train") == 2 and index.num_steps("validation") == 0
    assert history(index, key_of(folder / "1.jsonl", "p")) == [(1, 1, 0.0, 0.0), (2, 2, 0.5, 0.5)]
    assert history(index, "0" * 16) == []
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        index.history("train", "'; DROP TABLE groups")


def test_only_what_changed_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def reading(path: Path) -> Any:
        read.append(path.name)
        return read_table(path)

    monkeypatch.setattr(prompt_index, "read_table", reading)
    index = PromptIndex(folder)
    fill(index, folder)
    assert read == ["2.jsonl", "1.jsonl"], "newest first"
    key = key_of(folder / "1.jsonl", "p")
    dump(folder, 3, {"p": [1.0, 1.0]})
    dump(folder, 1, {"p": [1.0, 0.0, 0.0, 0.0]})
    fill(index, folder)
    assert read[2:] == ["3.jsonl", "1.jsonl"]
    (folder / "2.jsonl").unlink()
    restarted = PromptIndex(folder)
    fill(restarted, folder)
    assert read[4:] == [], "a restart reads nothing again"
    assert history(restarted, key) == [(1, 1, 0.25, 0.25), (3, 1, 1.0, 1.0)]
    assert [tuple(row) for row in restarted._query("SELECT COUNT(*) FROM groups")] == [(2,)], "old rows are gone"


@pytest.mark.parametrize("damage", ["garbage", "version", "broken later"])
def test_a_damaged_database_is_made_again(folder: Path, damage: str) -> None:
    index = PromptIndex(folder)
    fill(index, folder)
    key = key_of(folder / "1.jsonl", "p")
    if damage == "version":
        other = sqlite3.connect(index.file)
        other.execute("PRAGMA user_version = 99")
        other.close()
    elif damage == "garbage":
        index.file.write_bytes(b"not a database" * 1000)
    else:
        content = bytearray(index.file.read_bytes())
        content[4096:] = b"\xff" * len(content[4096:])
        index.file.write_bytes(content)
    restarted = PromptIndex(folder)
    for _ in range(2):  # damage inside the file is met by the first use
        fill(restarted, folder)
    assert [row[0] for row in history(restarted, key)] == [1, 2] and not is_in_memory(restarted)


def test_in_memory_if_the_folder_cannot_be_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    index = PromptIndex(folder)
    fill(index, folder)
    assert is_in_memory(index) and len(history(index, key_of(folder / "1.jsonl", "p"))) == 2


def test_in_memory_without_a_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    index = PromptIndex(folder)
    fill(index, folder)
    assert is_in_memory(index) and len(history(index, key_of(folder / "1.jsonl", "p"))) == 2


def test_two_dashboards_at_once(folder: Path) -> None:
    for step in range(3, 60):
        dump(folder, step, {"p": [0.0, 1.0], f"r{step}": [1.0]})
    indexes = [PromptIndex(folder), PromptIndex(folder)]
    threads = [index.fill(lambda: {"train": dumps_in(folder)}) for index in indexes]
    for thread in threads:
        thread.join(60)
    key = key_of(folder / "1.jsonl", "p")
    for index in [*indexes, PromptIndex(folder)]:
        assert [row[0] for row in history(index, key)] == list(range(1, 60))
        assert index._query("SELECT COUNT(*) FROM groups") == [(2 * 59,)]


def test_groups_of_one_prompt_in_a_step_are_taken_together(tmp_path: Path) -> None:
    rows = [
        {"input": "p", "score": score, "uid": uid} for uid, score in (("a", 0.0), ("a", 1.0), ("b", 1.0), ("b", 1.0))
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = PromptIndex(tmp_path)
    fill(index, tmp_path)
    ((step, number, stats),) = index.history("train", key_of(tmp_path / "1.jsonl", "p"))
    assert (step, number, stats.n, stats.mean, stats.pass_rate) == (1, 1, 4, 0.75, 0.75)
    assert stats.std == pytest.approx((3 / 16) ** 0.5)


def test_files_that_cannot_be_read_do_not_keep_it_busy(folder: Path) -> None:
    (folder / "9.jsonl").mkdir()
    index = PromptIndex(folder)
    thread = index.fill(lambda: {"train": dumps_in(folder)})
    thread.join(30)
    assert not thread.is_alive() and index.num_steps("train") == 2


def test_indexes_that_are_not_used_any_more_are_removed(folder: Path) -> None:
    index = PromptIndex(folder)
    fill(index, folder)
    old = index.file.with_name("old.sqlite")
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    PromptIndex(folder).num_steps("train")
    assert index.file.exists() and not old.exists()
