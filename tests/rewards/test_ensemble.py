"""Ensembles: the weighted sum, what each part adds to the columns, failures, and settings that are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.compose import load_config
from lockstep.config.ensemble import RESERVED, reward_parts
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import JudgeConfig, RewardModelConfig
from lockstep.protocol.keys import BATCH_KEYS
from lockstep.rewards.ensemble import within_groups
from lockstep.rewards.errors import AllRowsFailedError
from lockstep.rewards.managers import check_scorers, load_reward_manager
from tests.judge_server import serve, verdict
from tests.rewards.test_managers import TOKENIZER, make_batch, turns_batch

FUNCTIONS = """
import asyncio, time

def length(data_source, solution_str, ground_truth, extra_info, per=1.0):
    return {"score": len(solution_str) / per, "acc": 0.5}

async def slow(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.3)
    return 1.0

def sometimes(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "bad":
        raise RuntimeError("cannot score this")
    return None if solution_str == "skip" else 1.0

def per_turn(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "turn_rewards": [0.5] * (3 if len(solution_str) > 6 else 1)}

def not_finite(data_source, solution_str, ground_truth, extra_info):
    return float("nan")
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return f"{tmp_path}/functions.py"


def manager(ensemble: dict[str, Any], in_training: bool = True, **settings: Any) -> Any:
    config = PPOConfig(reward_model=RewardModelConfig(ensemble=ensemble, **settings))
    return load_reward_manager(config, TOKENIZER, 0, in_training)


def test_the_score_is_the_weighted_sum_and_each_part_a_column(functions: str) -> None:
    entries = {
        "correct": {"source": "scorer", "weight": 2.0, "kwargs": {"format_score": 0.5}},
        "length": {"source": f"{functions}:length", "weight": 0.1, "kwargs": {"per": 2.0}, "clip": [0, 3.5]},
    }
    result = manager(entries)(make_batch(["#### 2", "#### 3", "#### 2 .."]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == pytest.approx([2 + 0.3, 1 + 0.3, 2 + 0.35])
    assert torch.equal(result["reward_tensor"][0].nonzero(), torch.tensor([[6]]))
    extra = result["reward_extra_info"]
    assert (extra["correct"], extra["length"], extra["acc"]) == ([1.0, 0.5, 1.0], [3.0, 3.0, 4.5], [0.5] * 3)


def test_a_weight_of_0_is_the_same_as_leaving_it_out(functions: str) -> None:
    data = make_batch(["#### 2", "ab"])
    correct = {"correct": {"source": "scorer"}}
    unreachable = {"source": "judge", "weight": 0, "kwargs": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}}
    with_zeros = correct | {"judge": unreachable, "length": {"source": f"{functions}:length", "weight": 0.0}}
    alone, other = manager(correct)(data, return_dict=True), manager(with_zeros)(data, return_dict=True)
    assert torch.equal(alone["reward_tensor"], other["reward_tensor"])
    assert alone["reward_extra_info"] == other["reward_extra_info"]
    plain = load_reward_manager(PPOConfig(), TOKENIZER, 0, in_training=True)(data)
    assert torch.equal(alone["reward_tensor"], plain)


def test_two_judges_and_other_parts_are_called_at_the_same_time(functions: str) -> None:
    with serve(lambda body, _: dataclasses.replace(verdict(len(body["model"])), delay_s=0.3)) as server:
        entries = {
            "style": {"source": "judge", "weight": 1.0},
            "facts": {"source": "judge", "weight": 10.0, "kwargs": {"model": "other"}},
            "remote": {"source": f"{functions}:slow", "weight": 100.0},
        }
        judge = JudgeConfig(base_url=server.url, model="m")
        score = manager(entries, judge=judge)
        result = score(make_batch(["a", "b"]), return_dict=True)
        assert server.most_running > 2  # one after the other, there would be 2
    assert result["reward_tensor"].sum(-1).tolist() == pytest.approx([100 + 10 * 0.5 + 0.1] * 2)
    extra = result["reward_extra_info"]
    assert (extra["style"], extra["facts"], extra["remote"]) == ([0.1] * 2, [0.5] * 2, [1.0] * 2)
    assert extra["judge_reason"] == extra["facts/judge_reason"] == ["because"] * 2


def test_the_reward_model_is_a_part(functions: str) -> None:
    data = make_batch(["ab", "abc"])
    data.batch["rm_scores"] = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
    data.batch["rm_scores"][:, 2] = torch.tensor([-1.0, 4.0])
    entries = {"rm": {"source": "reward_model", "weight": 0.5}, "length": {"source": f"{functions}:length"}}
    result = manager(entries, enable=True)(data, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.5, 5.0]
    assert result["reward_extra_info"]["rm"] == [-1.0, 4.0]


def test_rewards_of_conversations_turn_level_trajectory_level_and_mixed(functions: str) -> None:
    data = turns_batch()
    columns = {"turn_rewards": [[0.5, 0.0, 1.0], [3.0]], "reward_scores": [{"a": 1.0, "b": 2.0}, {}]}
    for name, values in columns.items():
        data.non_tensor_batch[name] = values
    turns = {"turns": {"source": "turn_rewards", "weight": 2.0}}
    expected = torch.zeros(2, 10)
    expected[0, 1], expected[0, 9], expected[1, 6] = 1.0, 2.0, 6.0
    assert torch.equal(manager(turns)(data), expected)
    end = {"end": {"source": "rollout_reward_scores"}}
    assert manager(end)(data).nonzero().tolist() == [[0, 9]] and manager(end)(data).sum() == 3
    data.non_tensor_batch["reward_scores"][1] = {"steps": 9.0, "reward": 2.0}  # the other numbers are metrics
    assert manager(end)(data).sum(-1).tolist() == [3.0, 2.0]
    data.non_tensor_batch["reward_scores"][1] = {}
    mixed = turns | {"end": {"source": "rollout_reward_scores", "weight": 0.5, "kwargs": {"name": "b"}}}
    mixed["turns"] = mixed["turns"] | {"kwargs": {"reduce": "mean"}}
    expected = torch.zeros(2, 10)
    expected[0, 1], expected[0, 9], expected[1, 6] = 1 / 3, 2 / 3 + 1.0, 6.0
    result = manager(mixed)(data, return_dict=True)
    assert torch.allclose(result["reward_tensor"], expected)
    assert result["reward_extra_info"]["turns"] == [0.5, 3.0] and result["reward_extra_info"]["end"] == [2.0, 0.0]
    both = turns | {"own": {"source": f"{functions}:per_turn", "weight": 1.0}}
    assert manager(both)(data).sum(-1).tolist() == [3.0 + 2.5, 6.0 + 1.5]


def test_normalized_within_the_samples_of_a_prompt_in_training(functions: str) -> None:
    data = make_batch(["a", "abc", "abcde", "ab"], uid=["x", "x", "x", "y"])
    entries = {"length": {"source": f"{functions}:length", "normalize": "group", "weight": 2.0}}
    result = manager(entries)(data, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [-2.0, 0.0, 2.0, 4.0]  # a sample alone keeps its value
    assert result["reward_extra_info"]["length"] == [1.0, 3.0, 5.0, 2.0]
    assert manager(entries, in_training=False)(data).sum(-1).tolist() == [2.0, 6.0, 10.0, 4.0]
    assert within_groups([1.0, None, 1.0], ["x", "x", "x"], {"x": 3}) == [0.0, None, 0.0]
    entries["own"] = {"source": f"{functions}:sometimes"}
    left = manager(entries)(
        make_batch(["abcd", "bad"], uid=["x", "x"])
    )  # the other sample failed: no mean to compare with
    assert left.sum(-1).tolist() == [1.0, 0.0]


def test_a_part_that_fails_fails_the_row(functions: str, caplog: pytest.LogCaptureFixture) -> None:
    entries = {"length": {"source": f"{functions}:length"}, "own": {"source": f"{functions}:sometimes", "weight": 5}}
    result = manager(entries)(make_batch(["ok", "bad", "skip"]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [7.0, 0.0, 4.0]
    extra = result["reward_extra_info"]
    assert extra["reward_failed"] == [0.0, 1.0, 0.0] and extra["own"] == [1.0, None, None]
    assert "failed on 1 of 3 samples" in caplog.text
    with pytest.raises(
        AllRowsFailedError,
        match=r"reward_model\.ensemble \(length \+ own\) failed on 1 of 1 samples.*cannot score this",
    ):
        manager(entries)(make_batch(["bad"]))


def test_results_that_are_no_numbers_name_the_part(functions: str) -> None:
    with pytest.raises(ValueError, match=r"reward_model\.ensemble\.own: it returned nan; it must be a finite number"):
        manager({"own": {"source": f"{functions}:not_finite"}})(make_batch(["a"]))
    entries = {"own": {"source": f"{functions}:per_turn", "clip": [0, 1]}}
    with pytest.raises(ValueError, match="it returned turn_rewards; clip and normalize do not apply"):
        manager(entries)(turns_batch())


def test_rows_need_a_scorer_only_if_the_ensemble_has_one(functions: str) -> None:
    row = type("Row", (), {"location": "file:3", "columns": {"reward_model": {}}})()
    with pytest.raises(ValueError, match="file:3: no scorer for data_source 'unknown'"):
        check_scorers(manager({"a": {"source": "scorer"}}), {"unknown": row})
    check_scorers(manager({"a": {"source": f"{functions}:length"}}), {"unknown": row})


@pytest.mark.parametrize(
    "entries, key, message",
    [
        ({"a": "scorer"}, "a", "must be a mapping such as"),
        ({"a": {"source": "scorr"}}, "a.source", "must be one of scorer, judge, reward_model"),
        ({"a": {"source": "scorer", "wieght": 1}}, "a.wieght", "no such key. Did you mean weight?"),
        ({"a": {"source": "scorer", "weight": "much"}}, "a.weight", "must be a number"),
        ({"a": {"source": "scorer", "clip": [1, 0]}}, "a.clip", "the first must not be above the second"),
        ({"a": {"source": "scorer", "normalize": "batch"}}, "a.normalize", "must be one of group"),
        ({"a": {"source": "turn_rewards", "clip": [0, 1]}}, "a.source", "has a value per turn"),
        ({"a": {"source": "turn_rewards", "kwargs": {"reduce": "max"}}}, "a.kwargs.reduce", "must be sum or mean"),
        ({"a": {"source": "reward_model", "kwargs": {"x": 1}}}, "a.kwargs.x", "reward_model has no such option"),
        ({"reward_model": {"source": "reward_model"}}, "reward_model", "the batch has a column 'reward_model' already"),
        ({"a": {"source": "scorer", "weight": 0}}, "", "all weights are 0"),
    ],
)
def test_entries_that_are_wrong(entries: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reward_parts(entries)
    (problem,) = caught.value.problems
    assert problem.key == f"reward_model.ensemble.{key}".rstrip(".") and message in problem.message


def test_columns_of_the_batch_are_reserved() -> None:
    columns = {name for name, key in BATCH_KEYS.items() if key.dtype is None}
    assert columns <= RESERVED


SCORER = "reward_model.ensemble={a: {source: scorer}}"


@pytest.mark.parametrize(
    "settings, message",
    [
        ([SCORER, "custom_reward_function.path=json:dumps"], "name it as a source in reward_model.ensemble"),
        (
            [SCORER, "reward_model.enable=true", "reward_model.model.path={model}"],
            "reward_model.enable=true: reward_model.ens",
        ),
        (
            [SCORER, "reward_model.reward_manager=batch"],
            "scores with one function; set naive for reward_model.ensemble",
        ),
        (["reward_model.ensemble={a: {source: reward_model}}"], "there is none; set reward_model.enable=true"),
        (["reward_model.ensemble={a: {source: judge}}"], "reward_model.judge.base_url=null: the judge needs it"),
        (["reward_model.judge.enable=true", "reward_model.judge.model=m"], "reward_model.judge.base_url=null"),
        (
            ["reward_model.ensemble={a: {source: scorer, normalize: group}}", "algorithm.adv_estimator=remax"],
            "ensemble.a.normalize=group: the greedy baseline has no group",
        ),
        (["reward_model.max_rpm=0"], "reward_model.max_rpm=0: must be greater than 0"),
    ],
)
def test_settings_that_exclude_each_other(settings: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    files = [f"data.train_files={tmp_path}/data.jsonl", f"data.val_files={tmp_path}/data.jsonl"]
    model = [f"actor_rollout_ref.model.path={tmp_path}"]
    with pytest.raises(ConfigError) as caught:
        load_config(
            PPOConfig,
            [
                *files,
                *model,
                *(setting.format(model=tmp_path) if "{model}" in setting else setting for setting in settings),
            ],
        )
    assert message in str(caught.value)


def test_the_keys_of_verl() -> None:
    config = load_config(
        PPOConfig,
        [
            "reward.reward_manager.name=rate_limited",
            "reward.max_rpm=60",
            "reward_model.timeout=20",
            "+reward.max_tpm=500",
        ],
        run_checks=False,
    ).reward_model
    assert (config.reward_manager, config.max_rpm, config.timeout_s, config.max_tpm) == ("rate_limited", 60, 20.0, 500)
