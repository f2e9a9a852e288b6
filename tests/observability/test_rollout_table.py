"""A dump as a table: groups and their statistics, damaged and hostile lines, text search."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from lockstep.observability import rollout_table
from lockstep.observability.jsonl import json_line
from lockstep.observability.rollout_search import TextSearch
from lockstep.observability.rollout_table import read_table
from lockstep.trainer.ppo.metrics import CONVERSATION_COLUMNS


def row(uid: Any, score: Any, **more: Any) -> dict[str, Any]:
    return {"input": f"question {uid}", "output": "so 4", "gts": "4", "score": score, "step": 3, "uid": uid} | more


def write(path: Path, *rows: dict[str, Any] | bytes) -> Path:
    path.write_bytes(b"".join(entry if isinstance(entry, bytes) else json_line(entry) for entry in rows))
    return path


def test_statistics_agree_with_the_standard_library(tmp_path: Path) -> None:
    scores = [0.0, 1.0, 0.25, 0.75]
    lengths = [3, 8, 5, 100]
    rows = [
        row("a", score, length=length, finish_reason="length" if length == 100 else "stop")
        for score, length in zip(scores, lengths)
    ]
    table = read_table(write(tmp_path / "3.jsonl", *rows, row("b", 0.5), row("b", 0.5)))
    first, second = (group.stats for group in table.groups)
    assert (first.n, first.mean, first.low, first.high) == (4, 0.5, 0.0, 1.0)
    assert first.std == pytest.approx(statistics.pstdev(scores)) and first.length == statistics.fmean(lengths)
    assert first.cut == 0.25 and first.pass_rate == 0.5
    assert [group.has_equal_scores for group in table.groups] == [False, True]
    assert second.std == 0.0 and second.pass_rate == 0.0 and math.isnan(second.length)


def test_a_response_passes_by_acc_if_there_is_one(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "3.jsonl", row("a", -1.0, acc=1.0), row("a", 3.0, acc=0.0), row("a", 0.51)))
    assert [entry.passed for entry in table.groups[0].rows] == [True, False, True]


def test_rows_are_read_by_their_offsets(tmp_path: Path) -> None:
    rows = [row("a", 1.0, output="ü" * 9), row("b", 0.0), row("a", 0.0, output="\ud800 lone")]
    table = read_table(write(tmp_path / "3.jsonl", *rows))
    assert [[entry.line for entry in group.rows] for group in table.groups] == [[0, 2], [1]]
    assert [table.read(entry)["output"] for entry in table.rows.values()] == ["ü" * 9, "so 4", "\ud800 lone"]
    write(tmp_path / "3.jsonl", row("a", 1.0, output="other"))
    with pytest.raises(ValueError, match="has changed while it was read"):
        table.read(table.rows[0])


def test_any_content_is_a_table(tmp_path: Path) -> None:
    lines = [
        row("a", float("nan")),  # written as null
        b'{"input": "q", "uid": "a", "score": NaN}\n',
        b'{"input": "bad \xff\xfe bytes", "uid": "b", "score": 1}\n',
        b'{"input": ["a", {"list": 1}], "uid": {"odd": []}, "score": "high", "length": [], "finish_reason": 7}\n',
        b'{"score": 1e400, "uid": 12}\n',
        b'{"score": %s, "length": true}\n' % (b"9" * 400),
        b"\x00\x01garbage\n",
        b"[1, 2]\n",
        b'{"deep": ' + b"[" * 100_000 + b"\n",
        b"\n",
        b'{"input": "cut off',
    ]
    table = read_table(write(tmp_path / "3.jsonl", *lines))
    assert table.damaged == 4
    assert [group.uid for group in table.groups] == ["a", "b", '{"odd": []}', "12", None]
    assert [len(group.rows) for group in table.groups] == [2, 1, 1, 1, 1]
    assert not table.groups[0].has_equal_scores, "scores that are no numbers"
    assert "\ufffd" in table.groups[1].prompt and table.groups[2].rows[0].finish_reason == "7"
    assert table.summary.num_groups == 5 and table.summary.num_several == 1


def test_large_scores_do_not_overflow(tmp_path: Path) -> None:
    stats = read_table(write(tmp_path / "3.jsonl", row("a", 1e308), row("a", -1e308), row("a", 1e200))).groups[0].stats
    assert stats.n == 3 and stats.high == 1e308


def test_a_line_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_table, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "3.jsonl", row("a", 1.0), row("a", 0.0, output="y" * 5000), row("b", 1.0))
    table = read_table(path)
    assert table.damaged == 1 and list(table.rows) == [0, 2]
    assert table.read(table.rows[2])["uid"] == "b"


def test_without_uids_rows_with_one_prompt_are_a_group(tmp_path: Path) -> None:
    plain = [{"input": text, "output": "", "score": 1.0} for text in ("p", "q", "p")]
    table = read_table(write(tmp_path / "3.jsonl", *plain))
    assert [group.prompt for group in table.groups] == ["p", "q"] and len(table.groups[0].rows) == 2
    with_index = read_table(write(tmp_path / "4.jsonl", *(entry | {"index": 5} for entry in plain)))
    assert table.groups[0].key != with_index.groups[0].key, "another row of the data is another prompt"


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("SO 4", [0, 2]),
        ("ÜBER", [1]),
        ("über x", [1]),
        ('say "hi"\n', [1]),
        ("question c", [2]),
        ("uid", []),
        ("ü", [1]),
    ],
)
def test_text_search(tmp_path: Path, text: str, lines: list[int], ascii_only: bool) -> None:
    rows = [row("a", 1.0), row("b", 1.0, output='Über X, say "hi"\nthere'), row("c", 1.0)]
    path = tmp_path / "3.jsonl"
    path.write_text("".join(json.dumps(entry, ensure_ascii=ascii_only) + "\n" for entry in rows), encoding="utf-8")
    assert sorted(TextSearch(text).matching(path)) == lines


def test_search_excerpts(tmp_path: Path) -> None:
    path = write(tmp_path / "3.jsonl", row("a", 1.0, output="x" * 500 + "needle" + "y" * 500))
    ((_, _, hit),) = TextSearch("needle").lines(path)
    assert hit is not None and hit.column == "answer" and hit.excerpt == f"…{'x' * 80}needle{'y' * 80}…"
    for wrong in ("", "  ", "z" * 501):
        with pytest.raises(ValueError, match="must be 1 to 500 characters"):
            TextSearch(wrong)


@pytest.mark.parametrize("arguments", [{"city": 'the "Nile"'}, '{"city": "the \\"Nile\\""}'])
def test_search_looks_into_messages(tmp_path: Path, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,Sunny"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call, 7, {"function": None}]},
        {"role": "tool", "content": "Sunny, 31 degrees"},
        {"role": "user", "content": [image, {"type": "text", "text": "And at night?"}, "odd"]},
    ]
    rows = [
        row("a", 1.0),
        row("b", 1.0, messages=messages),
        row("c", 1.0, messages="sunny"),
        row("d", 1.0, messages=[3]),
    ]
    path = write(tmp_path / "3.jsonl", *rows)
    for text, column in (
        ("sunny", "tool message"),
        ("AT NIGHT", "user message"),
        ("weather", "tool call"),
        ('"city": ', "tool call"),
        ("nile", "tool call"),
    ):
        hits = [(line, hit.column) for line, _, hit in TextSearch(text).lines(path) if hit is not None]
        assert hits == [(1, column)], text


def test_counts_are_those_that_the_trainer_writes() -> None:
    assert set(rollout_table.COUNT_COLUMNS) == set(CONVERSATION_COLUMNS.values())
