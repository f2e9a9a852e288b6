"""Reward functions of several signatures as one: arguments by name, TRL's lists, weights."""

from typing import Any

import numpy as np
import pytest

from lockstep.rewards.functions import RewardFunctions, accepts, is_per_batch
from lockstep.rewards.monitor import raised_at

EXTRA = [{"prompt": "1+1=", "level": 1}, {"prompt": [{"role": "user", "content": "2+2="}], "level": 2}]


def call(*functions: Any) -> list[dict[str, Any]]:
    weighted = [f if isinstance(f, tuple) else (f, 1.0) for f in functions]
    return RewardFunctions(weighted)(["s", "s"], ["2", "5"], ["2", "4"], [dict(extra) for extra in EXTRA])


def right(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def test_rows_are_passed_by_name() -> None:
    def everything(
        data_source: str, completion: str, level: int, prompt: Any, extra_info: dict[str, Any]
    ) -> dict[str, Any]:
        return {"score": level, "seen": (data_source, completion, prompt == extra_info["prompt"])}

    assert call(right) == [{"score": 1.0}, {"score": 0.0}]
    assert call(everything) == [{"score": 1.0, "seen": ("s", "2", True)}, {"score": 2.0, "seen": ("s", "5", True)}]
    assert call(lambda **row: len(row["solution_str"])) == [{"score": 1.0}, {"score": 1.0}]


def test_batches_are_passed_as_in_trl() -> None:
    def check(
        prompts: list[Any], completions: list[Any], level: list[int], ground_truth: list[str], **rest: Any
    ) -> Any:
        assert prompts == [extra["prompt"] for extra in EXTRA] and "prompt" not in rest
        assert completions == ["2", [{"role": "assistant", "content": "5"}]]
        return np.array(level) * 1.0 if ground_truth == ["2", "4"] else None

    assert is_per_batch(check) and not is_per_batch(right)
    assert call(check) == [{"score": 1.0}, {"score": 2.0}]


def test_weights_add_up_and_none_adds_nothing() -> None:
    def bonus(completions: list[Any]) -> list[float | None]:
        return [None, 4.0]

    assert call((right, 2.0), (bonus, 0.25)) == [
        {"score": 2.0, "right": 1.0, "bonus": None},
        {"score": 1.0, "right": 0.0, "bonus": 4.0},
    ]


def test_wrong_functions_are_named() -> None:
    def short(completions: list[Any]) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"short .*test_functions\.py:\d+\) returned 1 values for 2 completions"):
        call(short)
    with pytest.raises(ValueError, match="different names, not right, right"):
        call(right, right)
    with pytest.raises(ValueError, match=r"<lambda> .*needs x, which the rows do not have\. Known: .*level"):
        RewardFunctions([(lambda x: 0.0, 1.0)]).check(["level"])
    RewardFunctions([(right, 1.0)]).check([])
    assert accepts(right, ["solution_str", "ground_truth"]) and not accepts(right, ["solution_str"])


def test_place_of_an_error_is_in_the_users_function() -> None:
    def fails(solution_str: str) -> float:
        raise KeyError("oops")

    with pytest.raises(KeyError) as caught:
        call(fails)
    assert raised_at(caught.value).endswith(" in fails")
