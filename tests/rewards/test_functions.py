"""Reward functions of several signatures as one: arguments by name, TRL's lists, weights."""

import time
from typing import Any

import numpy as np
import pytest

from lockstep.rewards.functions import RewardFunctions, accepts, is_per_batch
from lockstep.rewards.managers.functions import FunctionsRewardManager
from lockstep.rewards.managers.naive import ScoringRow
from lockstep.rewards.monitor import raised_at

EXTRA = [{"prompt": "1+1=", "level": 1}, {"prompt": [{"role": "user", "content": "2+2="}], "level": 2}]


def call(*functions: Any, timeout_s: float | None = None) -> list[Any]:
    weighted = [f if isinstance(f, tuple) else (f, 1.0) for f in functions]
    rows = [ScoringRow("s", text, truth, dict(extra), 1) for text, truth, extra in zip("25", "24", EXTRA)]
    return FunctionsRewardManager(None, 0, RewardFunctions(weighted), timeout_s=timeout_s)._score_all(rows)


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


def test_turn_rewards_are_weighted_and_added() -> None:
    def first(solution_str: str) -> dict[str, Any]:
        return {"score": 1.0, "turn_rewards": [1.0, 2.0]}

    def second(solution_str: str) -> dict[str, Any]:
        return {"turn_rewards": [0.0, 5.0]}

    def other(solution_str: str) -> dict[str, Any]:
        return {"turn_rewards": [0.0]}

    assert call(second) == [{"score": 0.0, "turn_rewards": [0.0, 5.0]}] * 2
    assert call((first, 0.5), (second, 2.0), (right, 1.0))[0] == {
        **{"score": 1.5, "turn_rewards": [0.5, 11.0]},
        **{"first": 4.0, "second": 5.0, "right": 1.0},
    }
    with pytest.raises(ValueError, match="reward other: 1 turn_rewards; another reward has 2 for this row"):
        call(first, other)


def test_wrong_functions_are_named() -> None:
    def short(completions: list[Any]) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"short returned 1 scores for 2 rows; it must return a list"):
        call(short)
    with pytest.raises(ValueError, match="different names, not right, right"):
        call(right, right)
    with pytest.raises(ValueError, match=r"<lambda> .*needs x, which the rows do not have\. Known: .*level"):
        RewardFunctions([(lambda x: 0.0, 1.0)]).check(["level"])
    RewardFunctions([(right, 1.0)]).check([])
    assert accepts(right, ["solution_str", "ground_truth"]) and not accepts(right, ["solution_str"])
    assert not accepts(lambda a, b=1: 0, ["a"]) and accepts(lambda a, **rest: 0, ["a"])


def test_place_of_an_error_is_in_the_users_function() -> None:
    def fails(solution_str: str) -> float:
        raise KeyError("oops")

    assert raised_at(call(fails)[0]).endswith(" in fails")


def test_dict_without_score_is_an_error() -> None:
    def wrong(solution_str: str) -> dict[str, float]:
        return {"reward": 1.0}

    for functions in ([wrong], [right, wrong], [lambda completions: [{"reward": 1.0}] * 2]):
        with pytest.raises(ValueError, match=r"returned for data_source 's' a dict without 'score': \['reward'\]"):
            call(*functions)


def test_each_sample_is_called_once_with_its_own_time_limit() -> None:
    calls: list[str] = []

    def fails_on_5(solution_str: str) -> float:
        calls.append(solution_str)
        time.sleep(0.15)  # both samples together exceed the limit
        return 1.0 / (5 - int(solution_str))

    def batch(completions: list[Any]) -> list[float]:
        calls.append("batch")
        return [1.0] * len(completions)

    first, second = call(fails_on_5, batch, timeout_s=0.25)
    assert first["score"] == pytest.approx(1 / 3 + 1) and isinstance(second, ZeroDivisionError)
    assert calls == ["2", "5", "batch"]


def test_manager_is_only_for_reward_functions() -> None:
    with pytest.raises(ValueError, match=r"passed to lockstep\.train; set naive or batch"):
        FunctionsRewardManager(None, 0, right)  # type: ignore[arg-type]
