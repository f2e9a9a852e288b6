"""The file of tokens: what is written is read again, and damaged files are refused with a reason."""

import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.observability import token_file
from lockstep.observability.token_file import NoTokens, token_path


def columns(num_rows: int = 3) -> dict[str, Any]:
    """Rows of different lengths, the first empty; in each row token 1 is context."""
    lengths = [2 * row for row in range(num_rows)]
    return {
        "row": [10 + row for row in range(num_rows)],
        "uid": [f"0:{row // 2}" for row in range(num_rows)],
        "prompts": [np.array([5, 6], np.int32)] * num_rows,
        "prompt_pieces": [[b"a", b"\xe4"]] * num_rows,
        "responses": [np.arange(length, dtype=np.int32) for length in lengths],
        "response_pieces": [[b"x"] * length for length in lengths],
        "response_mask": [np.arange(length) != 1 for length in lengths],
        "policy_versions": [np.where(np.arange(length) == 1, -1, row) for row, length in enumerate(lengths)],
        "rollout_log_probs": [-np.arange(length, dtype=np.float32) for length in lengths],
        "old_log_probs": [-np.arange(length, dtype=np.float32) - 0.25 for length in lengths],
    }


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = token_path(tmp_path / "7.jsonl")
    assert path.name == "7.tokens.parquet"
    token_file.write(path, columns(), {"step": 7, "old_log_probs": "pass"})
    assert pq.read_table(path)["row"].to_pylist() == [10, 11, 12]
    empty, last = token_file.read(path, 10), token_file.read(path, 12)
    assert empty.ids == [] and empty.turns() == [] and empty.shown()["gap"].size == 0
    assert (last.uid, last.prompt, last.pieces, last.ids) == ("0:1", [b"a", b"\xe4"], [b"x"] * 4, [0, 1, 2, 3])
    assert last.mask.tolist() == [True, False, True, True] and last.policy_versions.tolist() == [2, -1, 2, 2]
    assert last.turns() == [(0, 1, True), (1, 2, False), (2, 4, True)]
    assert last.shown()["rollout_log_probs"].tolist()[2:] == [-2, -3] and np.isnan(last.shown()["gap"][1])
    assert last.shown()["gap"][0] == -0.25
    assert last.missing() == {}


def test_rows_beyond_the_first_row_group_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "TOKENS_TOGETHER", 100)
    path = tmp_path / "1.tokens.parquet"
    token_file.write(path, columns(40), {})
    assert pq.ParquetFile(path).num_row_groups > 10
    assert [len(token_file.read(path, row).ids) for row in (10, 25, 26, 49)] == [0, 30, 32, 78]


def test_numbers_that_are_missing_have_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "1.tokens.parquet"
    without = {name: values for name, values in columns().items() if name != "old_log_probs"}
    for source, words in (("update", "old_log_prob_pass=always"), ("rollout", "bypass_mode")):
        token_file.write(path, without, {"old_log_probs": source})
        missing = token_file.read(path, 12).missing()
        assert missing.keys() == {"old_log_probs", "entropys", "gap"} and words in missing["gap"]
    token_file.write(path, without, {"old_log_probs": None})
    assert token_file.read(path, 12).missing() == {}, "a validation computes none"


def test_files_that_are_missing_damaged_or_foreign_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "1.tokens.parquet"
    with pytest.raises(NoTokens, match=r"trainer.rollout_token_data=true"):
        token_file.read(path, 0)
    token_file.write(path, columns(), {})
    with pytest.raises(NoTokens, match=r"tokens of 3 responses, and not of this one; trainer.rollout_token_rows"):
        token_file.read(path, 0)
    whole = path.read_bytes()
    for content in (b"", b"garbage", whole[:-20], whole[: len(whole) // 2], b"\0" * 5000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"1.tokens.parquet"):
            token_file.read(path, 12)
    pq.write_table(pa.table({"row": [1], "other": ["x"]}), path)
    with pytest.raises(ValueError, match=r"not a file of tokens .* row, other"):
        token_file.read(path, 1)
    wrong = pa.table(pq.read_table(_written(tmp_path)).to_pydict() | {"responses": [["a"], ["b"], ["c"]]})
    pq.write_table(wrong, path)
    with pytest.raises(ValueError, match="not a file of tokens"):
        token_file.read(path, 12)


def _written(folder: Path) -> Path:
    token_file.write(folder / "2.tokens.parquet", columns(), {})
    return folder / "2.tokens.parquet"


def test_bytes_that_are_changed_inside_do_no_harm(tmp_path: Path) -> None:
    path = _written(tmp_path)
    whole = path.read_bytes()
    for place in range(4, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(ValueError):
            token_file.read(path, 12)


def test_columns_of_other_lengths_are_refused(tmp_path: Path) -> None:
    changed = columns()
    changed["rollout_log_probs"] = [values[:1] for values in changed["rollout_log_probs"]]
    token_file.write(tmp_path / "1.tokens.parquet", changed, {})
    with pytest.raises(ValueError, match="1 values of rollout_log_probs for 4 tokens"):
        token_file.read(tmp_path / "1.tokens.parquet", 12)


def test_a_full_disk_raises_its_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        token_file.write(tmp_path / "1.tokens.parquet", columns(), {})
    assert list(tmp_path.iterdir()) == []
