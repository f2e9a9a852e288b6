"""The rollout log's files."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lockstep.observability.rollout_log import dump_generations


def test_dump_generations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extras = {"acc": np.array([True, False]), "pred": ["4", None], "odd": [1], "score": ["not", "this"]}
    extras |= {"length": [0.5, 0.6]}
    details = {"uid": ["a", "b"], "length": [3, 2]}
    texts = (["2+2?", "grün"], ["4", "a\nb"], ["4", {"x": 1}])
    path = dump_generations(*texts, [1.0, float("nan")], details, extras, tmp_path / "d", 7)
    assert path == tmp_path / "d/7.jsonl"
    assert os.listdir(tmp_path / "d") == ["7.jsonl"]
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"input": "2+2?", "output": "4", "gts": "4", "score": 1.0, "step": 7, "uid": "a", "length": 3, "acc": True}
        | {"pred": "4", "reward_length": 0.5},
        {
            "input": "grün",
            "output": "a\nb",
            "gts": {"x": 1},
            "score": None,
            "step": 7,
            "uid": "b",
            "length": 2,
            "acc": False,
            "pred": None,
            "reward_length": 0.6,
            "non_finite": {"score": "nan"},
        },
    ]
    assert "skipping odd: 1 values for 2 answers" in caplog.text


def test_numbers_of_the_batch_have_the_digits_of_float32(tmp_path: Path) -> None:
    third = np.float32(1 / 3).item()
    path = dump_generations(
        ["q"], ["a"], ["gt"], [np.float32(0.3).item()], {"advantage": [third]}, {"own": [third]}, tmp_path, 1
    )
    row = json.loads(path.read_text())
    assert (row["score"], row["advantage"], row["own"]) == (0.3, 0.3333333, third)


def test_dump_generations_replaces_the_file_of_a_repeated_step(tmp_path: Path) -> None:
    for answer in ("first", "second"):
        path = dump_generations(["q"], [answer], ["gt"], [0.0], {}, {}, tmp_path, 1)
    assert json.loads(path.read_text())["output"] == "second"


def test_dump_generations_rejects_columns_of_different_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 values of score for 2 inputs"):
        dump_generations(["a", "b"], ["c", "d"], [1, 2], [0.0], {}, {}, tmp_path, 1)
