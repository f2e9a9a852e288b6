"""Reward managers that score one row at a time, limits on their calls, and verl's older reward keys."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lockstep.rewards.managers import REWARD_MANAGERS
from lockstep.verl import DataProto
from lockstep.verl._config import default_tree, typed_config
from lockstep.verl.experimental.reward_loop import migrate_legacy_reward_impl
from lockstep.verl.experimental.reward_loop.reward_manager import (
    NaiveRewardManager,
    RateLimitedRewardManager,
    RewardManagerBase,
    get_reward_manager_cls,
    register,
)
from lockstep.verl.experimental.reward_loop.reward_manager.limited import AsyncTokenBucket
from lockstep.verl.trainer.ppo.reward import load_reward_manager
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()

pytestmark = pytest.mark.usefixtures("no_registrations")


@pytest.fixture
def limits() -> Iterator[type[RateLimitedRewardManager]]:
    """A class with limits of its own: those of the process are set once."""

    class Limited(RateLimitedRewardManager):
        pass

    yield Limited


def batch_of(*answers: str) -> DataProto:
    ids = [TOKENIZER.encode(answer) for answer in answers]
    width = max(map(len, ids))
    responses = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * (len(row) + 1) + [0] * (width - len(row)) for row in ids])
    rows = len(answers)
    return DataProto.from_dict(
        {"prompts": torch.full((rows, 1), 5), "responses": responses, "attention_mask": mask},
        {
            "data_source": np.array(["mine"] * rows, dtype=object),
            "reward_model": np.array([{"ground_truth": "yes"}] * rows, dtype=object),
            "extra_info": np.array([{"index": n} for n in range(rows)], dtype=object),
        },
    )


def test_scores_of_plain_and_async_functions() -> None:
    def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return float(solution_str == ground_truth) + extra_info["index"]

    async def detailed(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
        return {"score": 2.0, "length": len(solution_str)}

    data = batch_of("yes", "no")
    result = NaiveRewardManager(tokenizer=TOKENIZER, compute_score=plain)(data, return_dict=True)
    assert isinstance(result, dict) and result["reward_extra_info"] == {"acc": [1.0, 1.0]}
    assert result["reward_tensor"].tolist() == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]  # at the last token
    result = NaiveRewardManager(tokenizer=TOKENIZER, compute_score=detailed)(data, return_dict=True)
    assert isinstance(result, dict) and result["reward_extra_info"] == {"length": [3, 2]}
    assert result["reward_tensor"].sum(-1).tolist() == [2.0, 2.0]


def test_a_programs_manager_is_selected_by_its_name() -> None:
    @register("lengths_of_a_test")
    class Lengths(RewardManagerBase):
        async def run_single(self, data: DataProto) -> dict[str, Any]:
            factor = self.config.reward_model.get("factor", 1.0)
            return {"reward_score": factor * len(self.response_of(data)), "reward_extra_info": {}}

    assert get_reward_manager_cls("lengths_of_a_test") is Lengths and "lengths_of_a_test" in REWARD_MANAGERS
    config = OmegaConf.create(default_tree())
    config.reward_model.reward_manager = "lengths_of_a_test"
    manager = load_reward_manager(config, TOKENIZER, num_examine=0, factor=0.5)
    assert manager(batch_of("yes", "no")).sum(-1).tolist() == [1.5, 1.0]
    with pytest.raises(ValueError, match="no reward manager 'none'"):
        get_reward_manager_cls("none")


def test_limits_are_kept_and_failures_score_zero(limits: type[RateLimitedRewardManager]) -> None:
    running = [0, 0]

    async def slow(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.01 if solution_str != "late" else 5)
        running[0] -= 1
        if solution_str == "bad":
            raise RuntimeError("no answer")
        return 1.0

    config = OmegaConf.create({"reward_model": {"max_concurrent": 2, "timeout": 0.2}})
    manager = limits(config=config, tokenizer=TOKENIZER, compute_score=slow)
    result = manager(batch_of("one", "two", "bad", "six", "late"), return_dict=True)
    assert isinstance(result, dict) and running[1] == 2
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]
    extra = result["reward_extra_info"]
    assert extra["error"] == [None, None, "no answer", None, None] and extra["timeout"][-1] is True
    assert extra["acc"] == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_an_error_whose_message_cannot_be_kept(limits: type[RateLimitedRewardManager]) -> None:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    async def fail(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        raise Unreadable if solution_str == "odd" else ValueError("\ud800" + "x" * 10**6)

    manager = limits(config=OmegaConf.create({}), tokenizer=TOKENIZER, compute_score=fail)
    result = manager(batch_of("odd", "long"), return_dict=True)
    assert isinstance(result, dict) and result["reward_tensor"].sum(-1).tolist() == [0.0, 0.0]
    first, second = result["reward_extra_info"]["error"]
    assert first == "(its message cannot be read)" and second.startswith("\ufffdxx") and len(second) <= 300


def test_limits_are_set_once(limits: type[RateLimitedRewardManager], caplog: pytest.LogCaptureFixture) -> None:
    limits(config=OmegaConf.create({"reward_model": {"max_rpm": 60}}), tokenizer=TOKENIZER)
    limits(config=OmegaConf.create({"reward_model": {"max_rpm": 60}}), tokenizer=TOKENIZER)
    assert not caplog.messages and limits._max_rpm == 60
    limits(config=OmegaConf.create({"reward_model": {"max_rpm": 90}}), tokenizer=TOKENIZER)
    assert "max_rpm=90, max_tpm=None have no effect" in caplog.messages[0] and limits._max_rpm == 60


def test_a_token_bucket_waits_for_its_tokens() -> None:
    async def run() -> tuple[float, float, float]:
        bucket = AsyncTokenBucket(rate_limit=100.0, max_tokens=10.0)
        start = time.monotonic()
        await bucket.acquire(10)
        at_once = time.monotonic() - start
        await asyncio.gather(*(bucket.acquire(5) for _ in range(2)))
        refilled = time.monotonic() - start
        await bucket.acquire(20)  # more than it holds
        return at_once, refilled, time.monotonic() - start

    at_once, refilled, larger = asyncio.run(run())
    assert at_once < 0.09 <= refilled and refilled + 0.19 <= larger
    assert AsyncTokenBucket(5.0).max_tokens == AsyncTokenBucket(5.0).tokens == 5.0


def test_older_reward_keys_become_newer_ones() -> None:
    config = OmegaConf.create(default_tree())
    config.reward_model.reward_manager = "dapo"
    config.custom_reward_function.path = "mine.py"
    config.custom_reward_function.name = "score"
    config.reward_model.sandbox_fusion.url = "http://127.0.0.1:1/run_code"
    migrated = migrate_legacy_reward_impl(config)
    assert migrated is config and config.reward.reward_manager.name == "dapo"
    assert config.reward.custom_reward_function.path == "mine.py"
    assert config.reward.sandbox_fusion.url.endswith("run_code")
    typed = typed_config(config, run_checks=False)
    assert (typed.reward_model.reward_manager, typed.custom_reward_function.name) == ("dapo", "score")
