"""Rows as users write them, as objects and in files: completed to the columns that training reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lockstep.config.data import DataConfig
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.rows import is_file_reference, to_schema, write_rows
from lockstep.rewards.default import check_data_sources
from tests.tiny import tiny_tokenizer

MESSAGES = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1="}]


def schema(row: dict[str, Any]) -> dict[str, Any]:
    return to_schema(row, 4, "prompt", "data_source")


def test_simple_rows_get_the_schema() -> None:
    assert schema({"prompt": "1+1=", "answer": "2", "level": 3}) == {
        "answer": "2",
        "level": 3,
        "data_source": "default",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 4, "prompt": "1+1=", "answer": "2", "level": 3},
    }
    row = schema({"prompt": MESSAGES, "ground_truth": "2", "answer": "two", "data_source": "mine"})
    assert row["prompt"] == MESSAGES and row["reward_model"]["ground_truth"] == "2" and row["data_source"] == "mine"
    assert schema({"prompt": "Write a poem."})["reward_model"] == {"style": "model", "ground_truth": None}
    full = {"data_source": "s", "prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": "2"}}
    assert schema(full) == full
    assert schema({"prompt": "1+1=", "reward_model": full["reward_model"]}) == {
        "data_source": "default",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": full["reward_model"],
    }


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_files_of_simple_rows_are_read_as_lists_are(suffix: str, tmp_path: Path) -> None:
    """Text and messages in one file; the agent of a row stays its column."""
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "answer": "2", "level": 1},
        {"prompt": "2+2=", "solution": "4", "agent_name": "tool_agent"},
    ]
    if suffix != "parquet":
        rows.append({"prompt": MESSAGES, "ground_truth": "2", "data_source": "mine"})
    file = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        lines = [json.dumps(row) for row in rows]
        file.write_text("\n".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]")
    from_file = list(RLHFDataset(str(file), tiny_tokenizer(), DataConfig()))
    write_rows(rows, tmp_path / "list.jsonl")
    from_list = list(RLHFDataset(str(tmp_path / "list.jsonl"), tiny_tokenizer(), DataConfig()))
    for one, other in zip(from_file, from_list, strict=True):
        for name in ("data_source", "reward_model", "raw_prompt", "raw_prompt_ids", "index"):
            assert one[name] == other[name]
        assert {k: v for k, v in one["extra_info"].items() if v == v and v is not None} == other["extra_info"]
    assert [row["reward_model"]["ground_truth"] for row in from_file][:2] == ["2", "4"]
    assert from_file[1]["agent_name"] == "tool_agent" and from_file[0]["raw_prompt"][0]["content"] == "1+1="


def test_a_scorer_needs_the_ground_truth_of_every_row(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "Hello!"}]
    write_rows([row | {"data_source": "openai/gsm8k"} for row in rows], tmp_path / "rows.jsonl")
    sources = RLHFDataset(str(tmp_path / "rows.jsonl"), tiny_tokenizer(), DataConfig()).data_sources
    with pytest.raises(
        ValueError, match=r"rows\.jsonl, row 1 has no ground truth, .*add the column 'answer', or set custom"
    ):
        check_data_sources({}, sources)
    write_rows(rows, tmp_path / "rows.jsonl")
    sources = RLHFDataset(str(tmp_path / "rows.jsonl"), tiny_tokenizer(), DataConfig()).data_sources
    with pytest.raises(ValueError, match="no scorer for data_source 'default'"):
        check_data_sources({}, sources)


class Rows:
    """Iterable like a datasets.Dataset."""

    def __iter__(self) -> Any:
        return iter([{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}])


@pytest.mark.parametrize(
    "data",
    [
        [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}],
        Rows(),
        pd.DataFrame({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"], "vector": [np.arange(2), np.arange(2)]}),
    ],
    ids=["list", "dataset", "frame"],
)
def test_any_rows_are_read_by_the_dataset(data: Any, tmp_path: Path) -> None:
    columns = write_rows(data, tmp_path / "in" / "train.jsonl")
    assert {"prompt", "answer"} <= set(columns)
    dataset = RLHFDataset(str(tmp_path / "in" / "train.jsonl"), tiny_tokenizer(), DataConfig())
    assert [row["reward_model"]["ground_truth"] for row in dataset] == ["2", "4"]
    assert [row["extra_info"]["index"] for row in dataset] == [0, 1]
    json.loads((tmp_path / "in" / "train.jsonl").read_text().splitlines()[0])


def test_files_are_told_from_rows() -> None:
    assert is_file_reference("a.parquet") and is_file_reference(Path("a")) and is_file_reference(["a", Path("b")])
    assert not is_file_reference([]) and not is_file_reference([{"prompt": "a"}]) and not is_file_reference(Rows())
