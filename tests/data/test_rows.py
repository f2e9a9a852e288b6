"""Rows given as objects: brought to the schema of training files and read back by the dataset."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lockstep.config.data import DataConfig
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.rows import is_file_reference, to_schema, write_rows
from tests.tiny import tiny_tokenizer

MESSAGES = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1="}]


def schema(row: dict[str, Any]) -> dict[str, Any]:
    return to_schema(row, 4, "prompt", "data_source")


def test_simple_rows_get_the_schema() -> None:
    assert schema({"prompt": "1+1=", "answer": "2", "level": 3}) == {
        "data_source": "python",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 4, "prompt": "1+1=", "answer": "2", "level": 3},
    }
    row = schema({"prompt": MESSAGES, "ground_truth": "2", "answer": "two", "data_source": "mine"})
    assert row["prompt"] == MESSAGES and row["reward_model"]["ground_truth"] == "2" and row["data_source"] == "mine"
    assert schema({"prompt": "Write a poem."})["reward_model"] == {"style": "model", "ground_truth": None}
    full = {"data_source": "s", "prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": "2"}}
    assert schema(full) == full


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
