"""Columns of a metrics file that is written, cut, replaced or damaged."""

import math
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.observability.dashboard import metrics_store
from lockstep.observability.dashboard.metrics_store import MetricsStore
from lockstep.observability.jsonl import json_line


def append(file: Path, *rows: dict[str, Any] | bytes) -> None:
    with open(file, "ab") as lines:
        for row in rows:
            lines.write(row if isinstance(row, bytes) else json_line(row))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps_of(store: MetricsStore) -> list[int]:
    return sorted({step for name in store.names() for step in store.column(name)[0]})


def test_a_file_that_grows(file: Path) -> None:
    store = MetricsStore(file)
    assert (
        steps_of(store) == [] and store.names() == [] and store.last() == (0, {}) and store.column("a") == ([], [], [])
    )
    append(file, {"step": 1, "time": 5.0, "a": 1, "b": 0.5}, b'{"step": 2, "time": 6.0, "a"')
    assert store.column("a") == ([1], [1.0], [5.0]) and store.last() == (1, {"a": 1.0, "b": 0.5})
    append(file, b": 3}\n")
    assert store.column("a") == ([1, 2], [1.0, 3.0], [5.0, 6.0]) and store.last() == (2, {"a": 3.0})
    assert store.names() == ["a", "b"] and steps_of(store) == [1, 2]
    file.unlink()
    assert steps_of(store) == [] and store.last() == (0, {})


def test_the_last_value_of_a_step_counts(file: Path) -> None:
    append(
        file,
        {"step": 3, "a": 1},
        {"step": 2, "a": 2},
        {"step": 3, "b": 7},
        {"step": 2, "b": 0, "a": 4},
        {"step": 1, "a": 0},
    )
    store = MetricsStore(file)
    assert store.last() == (3, {"a": 1.0, "b": 7.0})  # from the end of the file
    assert store.column("a")[:2] == ([1, 2, 3], [0.0, 4.0, 1.0])
    assert store.column("b")[:2] == ([2, 3], [0.0, 7.0])
    append(file, {"step": 3, "b": 8})
    assert store.last() == (3, {"a": 1.0, "b": 8.0})  # from the columns


def test_what_is_no_number(file: Path) -> None:
    deep = b"[" * 100_000 + b"\n"
    append(file, b"\xff\x00garbage\n", b"\n", b"[1, 2]\n", b'{"a": 1}\n', b'{"step": "x", "a": 1}\n', b"7\n", deep)
    append(file, {"step": 1, "time": "now", "a": math.nan, "b": -math.inf, "c": 3})
    append(file, b'{"step": 2, "a": "0.5", "b": null, "c": [1], "d": {"e": 1}, "e": true, "f": 1' + b"0" * 400 + b"}\n")
    append(file, b'{"step": 1e400, "a": 1}\n', b'{"step": null, "a": 1}\n', b'{"step": 99999999999999999999, "a": 1}\n')
    store = MetricsStore(file)
    assert store.names() == ["a", "b", "c", "e"] and steps_of(store) == [1, 2]
    (steps, values, times) = store.column("a")
    assert steps == [1] and math.isnan(values[0]) and math.isnan(times[0])
    assert store.column("b")[:2] == ([1], [-math.inf])
    assert store.column("e")[:2] == ([2], [1.0])


def test_a_line_that_is_too_long(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_store, "CHUNK_BYTES", 16)
    monkeypatch.setattr(metrics_store, "MOST_LINE_BYTES", 64)
    append(file, {"step": 1, "a": 1}, b'{"step": 2, "a": 2, "b": "' + b"x" * 500)
    store = MetricsStore(file)
    assert steps_of(store) == [1]
    append(file, b'"}\n', {"step": 3, "a": 3})
    assert store.column("a")[:2] == ([1, 3], [1.0, 3.0])


def test_a_file_that_is_replaced(file: Path) -> None:
    append(file, *({"step": step, "a": step} for step in range(1, 6)))
    store = MetricsStore(file)
    assert steps_of(store) == [1, 2, 3, 4, 5]
    os.truncate(file, file.read_bytes().index(b'{"step": 3'))  # as a resume from step 2 does
    assert steps_of(store) == [1, 2]
    file.write_bytes(b"".join(json_line({"step": step, "a": -step}) for step in range(1, 10)))  # same inode, longer
    assert store.column("a")[:2] == (list(range(1, 10)), [-float(step) for step in range(1, 10)])
    other = file.with_name("other")
    append(other, {"step": 7, "b": 1})
    other.replace(file)
    assert store.names() == ["b"] and store.last() == (7, {"b": 1.0})


def test_the_end_of_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_store, "TAIL_BYTES", 8)
    append(file, {"step": 1, "a": 1}, {"step": 2, "a": 2}, b"x" * 100, b"\n", b'{"step": 3')
    store = MetricsStore(file)
    assert store.last() == (2, {"a": 2.0}) and not store._blocks
    file.write_bytes(b"x" * 1000)
    assert store.last() == (0, {})


def test_against_rows_in_a_dict(file: Path) -> None:
    """Random lines, read on at random places, give what a plain dict of dicts gives."""
    noise = random.Random(0)
    expected: dict[int, dict[str, float]] = {}
    store = MetricsStore(file)
    for _ in range(300):
        row = {name: noise.choice([noise.random(), noise.randint(0, 9)]) for name in noise.sample("abcdef", 3)}
        step = noise.randint(0, 100)
        expected.setdefault(step, {}).update(row)
        append(file, {"step": step, "time": 1.0, **row})
        if noise.random() < 0.1:
            assert steps_of(store) == sorted(expected)
    for name in "abcdef":
        steps = [step for step in sorted(expected) if name in expected[step]]
        assert store.column(name)[:2] == (steps, [expected[step][name] for step in steps])
    assert store.last() == (max(expected), expected[max(expected)])
    assert MetricsStore(file).arrays("a").values.dtype == np.float64


def test_several_threads(file: Path) -> None:
    store = MetricsStore(file)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(50):
                steps, values, _ = store.column("a")
                assert steps == sorted(set(steps)) and values == [float(step) for step in steps]
                store.last()
        except BaseException as error:  # noqa: BLE001 - shown below
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(200):
        append(file, {"step": step, "a": step})
    for thread in threads:
        thread.join()
    assert not failed and steps_of(store) == list(range(200))
