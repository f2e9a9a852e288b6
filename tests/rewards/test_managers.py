"""Reward managers: score positions, extra info, and when a bad reward function stops the run."""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from lockstep.protocol import DataProto
from lockstep.rewards.errors import RewardError, RewardHangError
from lockstep.rewards.managers import (
    REWARD_MANAGERS,
    BatchRewardManager,
    DapoRewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    load_reward_manager,
    scorer_options,
)
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PAD, EOS = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
PROMPT_LENGTH, RESPONSE_LENGTH = 6, 10


def make_batch(responses: list[str], sources: list[str] | None = None, **columns: Any) -> DataProto:
    """Left-padded prompts `1+1=`, right-padded responses ending in EOS."""
    prompt = TOKENIZER("1+1=")["input_ids"]
    prompts = torch.tensor([[PAD] * (PROMPT_LENGTH - len(prompt)) + prompt] * len(responses))
    rows = [TOKENIZER(text)["input_ids"] + [EOS] for text in responses]
    padded = torch.tensor([row + [PAD] * (RESPONSE_LENGTH - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (RESPONSE_LENGTH - len(row)) for row in rows])
    prompt_mask = (torch.arange(PROMPT_LENGTH) >= PROMPT_LENGTH - len(prompt)).long().expand(len(rows), -1)
    tensors = {
        "prompts": prompts,
        "responses": padded,
        "attention_mask": torch.cat([prompt_mask, mask], dim=1),
        "response_mask": mask,
    }
    objects = {
        "data_source": sources or ["openai/gsm8k"] * len(rows),
        "reward_model": [{"style": "rule", "ground_truth": "2"}] * len(rows),
        "extra_info": [{"index": i} for i in range(len(rows))],
    }
    return DataProto.from_dict(tensors, {k: v for k, v in (objects | columns).items() if v is not None})


def run(compute_score: Any, data: DataProto, **options: Any) -> Any:
    return NaiveRewardManager(TOKENIZER, 0, compute_score, **options)(data, return_dict=True)


def test_score_is_at_the_last_response_token() -> None:
    data = make_batch(["#### 2", "#### 3", "#### 2 .."])
    reward = NaiveRewardManager(TOKENIZER, num_examine=0)(data)
    expected = torch.zeros(3, RESPONSE_LENGTH)
    expected[0, 6] = 1.0  # six characters, then EOS
    expected[2, 9] = 1.0
    assert torch.equal(reward, expected) and reward.dtype == torch.float32


def test_attention_mask_is_used_without_response_mask() -> None:
    data = make_batch(["#### 2"])
    data.pop(["response_mask"])
    assert NaiveRewardManager(TOKENIZER, 0)(data)[0, 6] == 1.0


def test_trailing_tool_tokens_are_decoded_but_do_not_get_the_score() -> None:
    data = make_batch(["#### 2"])
    data.batch["response_mask"][0, 3:] = 0
    assert NaiveRewardManager(TOKENIZER, 0)(data).nonzero().tolist() == [[0, 2]]


def test_function_sees_text_without_special_tokens_and_its_own_extra_info() -> None:
    seen: list[dict[str, Any]] = []

    def spy(**arguments: Any) -> float:
        arguments["extra_info"]["mark"] = True
        seen.append(arguments)
        return 0.0

    data = make_batch(["two"])
    run(spy, data)
    assert seen == [
        {
            "data_source": "openai/gsm8k",
            "solution_str": "two",
            "ground_truth": "2",
            "extra_info": {"index": 0, "mark": True},
        }
    ]
    assert data.non_tensor_batch["extra_info"][0] == {"index": 0}


def test_dict_results_fill_extra_info_with_none_if_absent() -> None:
    def judge(solution_str: str, **_: Any) -> Any:
        return {"score": 0.5, "acc": True, "pred": solution_str} if solution_str == "a" else 1

    result = run(judge, make_batch(["a", "b"]))
    assert result["reward_tensor"].sum(dim=1).tolist() == [0.5, 1.0]
    assert result["reward_extra_info"] == {"reward_failed": [0.0, 0.0], "acc": [True, None], "pred": ["a", None]}


def test_rm_scores_are_used_unchanged() -> None:
    data = make_batch(["a", "b"], data_source=None, reward_model=None)
    data.batch["rm_scores"] = torch.rand(2, RESPONSE_LENGTH)
    result = run(None, data)
    assert torch.equal(result["reward_tensor"], data.batch["rm_scores"])
    assert result["reward_extra_info"] == {}


async def slow_score(solution_str: str, running: list[int], **_: Any) -> float:
    running[0] += 1
    running[1] = max(running[1], running[0])
    await asyncio.sleep(0.01)
    running[0] -= 1
    if solution_str == "bad":
        raise ValueError("no opinion")
    return float(len(solution_str))


def test_coroutine_functions_run_concurrently_up_to_the_limit() -> None:
    running = [0, 0]
    result = run(partial(slow_score, running=running), make_batch(["a", "bb", "bad", "c"] * 3), max_concurrency=5)
    assert result["reward_tensor"].sum(dim=1).tolist() == [1.0, 2.0, 0.0, 1.0] * 3
    assert result["reward_extra_info"]["reward_failed"] == [0.0, 0.0, 1.0, 0.0] * 3
    assert running == [0, 5]


def test_coroutine_functions_work_inside_a_running_loop() -> None:
    async def main() -> Any:
        return run(partial(slow_score, running=[0, 0]), make_batch(["abc"]))

    assert asyncio.run(main())["reward_tensor"].sum() == 3.0


def fail_on_b(solution_str: str, **_: Any) -> float:
    if solution_str == "b":
        raise KeyError("no b")
    return 1.0


def test_one_failure_affects_one_sample_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = run(fail_on_b, make_batch(["a", "b", "b"]))
    assert result["reward_tensor"].sum(dim=1).tolist() == [1.0, 0.0, 0.0]
    assert result["reward_extra_info"] == {"reward_failed": [0.0, 1.0, 1.0]}
    (record,) = caplog.records
    assert "fail_on_b failed on 2 of 3 samples" in record.getMessage() and "no b" in caplog.text


def test_failure_of_a_whole_batch_stops_the_run() -> None:
    message = (
        r"fail_on_b failed on 2 of 2 samples.*'openai/gsm8k'; 2 of them with KeyError\('no b'\) at \S+test_managers\.py:\d+ in "
        r"fail_on_b\. .* fix the reward function$"
    )
    with pytest.raises(RewardError, match=message) as caught:
        run(fail_on_b, make_batch(["b", "b"]))
    assert isinstance(caught.value.__cause__, KeyError)


def test_failure_of_a_whole_batch_in_a_worker_names_the_line(tmp_path: Path) -> None:
    source = "def judge(text):\n    return text['a']\n\ndef compute_score(solution_str, **kw):\n    return judge({})\n"
    message = (
        r"with KeyError\('a'\) at \S+reward_file\.py:2 in judge, called from \S+reward_file\.py:5 in compute_score\."
    )
    with pytest.raises(RewardError, match=message):
        with_file(tmp_path, source)(make_batch(["a", "b"]))


def test_error_outside_the_function_stops_the_run_even_in_a_mixture() -> None:
    def no_grader(solution_str: str, **_: Any) -> float:
        if solution_str == "b":
            raise RewardError("the grader cannot be started")
        return 1.0

    with pytest.raises(RewardError, match="the grader cannot be started"):
        run(no_grader, make_batch(["a", "b"]))


def test_unknown_data_source_stops_the_run_even_in_a_mixture() -> None:
    with pytest.raises(ValueError, match=r"no scorer for data_source 'mine'.*custom_reward_function\.path"):
        run(None, make_batch(["#### 2", "#### 2"], sources=["openai/gsm8k", "mine"]))


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (float("nan"), "the score nan; it must be a finite number"),
        (float("inf"), "the score inf"),
        ("1.0", "the score '1.0'"),
        (None, "the score None"),
        ({"acc": 1}, r"a dict without 'score': \['acc'\]"),
        ({"score": None}, "the score None"),
    ],
)
def test_results_that_are_not_finite_numbers_stop_the_run(outcome: Any, message: str) -> None:
    def odd(**_: Any) -> Any:
        return outcome

    with pytest.raises(ValueError, match=rf"odd returned for data_source 'openai/gsm8k' {message}"):
        run(odd, make_batch(["a"]))


def test_numpy_and_torch_scalars_are_accepted() -> None:
    outcomes = iter([torch.tensor(0.25), torch.tensor([0.5]).numpy()[0], True])
    result = run(lambda **_: next(outcomes), make_batch(["a", "b", "c"]))
    assert result["reward_tensor"].sum(dim=1).tolist() == [0.25, 0.5, 1.0]


def test_examples_are_logged_per_data_source(caplog: pytest.LogCaptureFixture) -> None:
    data = make_batch(["#### 2", "#### 3", "#### 4"], sources=["openai/gsm8k", "openai/gsm8k", "aime24"])
    with caplog.at_level(logging.INFO):
        NaiveRewardManager(TOKENIZER, 1)(data)
    assert len(caplog.records) == 2
    assert "[prompt] 1+1=\n[response] #### 2\n[ground truth] 2\n[score] 1.0" in caplog.text


def test_examples_are_logged_without_terminal_escapes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        NaiveRewardManager(TOKENIZER, 1)(make_batch(["\x1b[2J\x1b]0;title\x07#### 2"]))
    assert "[response] \ufffd[2J\ufffd]0;title\ufffd#### 2\n" in caplog.text


def test_missing_columns_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"no 'data_source', which scoring needs.*data\.reward_fn_key"):
        run(None, make_batch(["a"], data_source=None))
    with pytest.raises(ValueError, match=r"row 0 of data_source 'openai/gsm8k' has no reward_model\.ground_truth"):
        run(None, make_batch(["a"], reward_model=[{"style": "rule"}]))


def test_load_reward_manager(tmp_path: Path) -> None:
    data = make_batch(["It is 2"])
    assert load_reward_manager(PPOConfig(), TOKENIZER, 0)(data).sum() == 0.0
    flexible = PPOConfig(custom_reward_function=CustomRewardFunctionConfig(reward_kwargs={"method": "flexible"}))
    assert load_reward_manager(flexible, TOKENIZER, 0)(data).sum() == 1.0
    wrong = make_batch(["#### 3"])
    assert load_reward_manager(PPOConfig(), TOKENIZER, 0)(wrong).sum() == 0.0
    assert load_reward_manager(PPOConfig(), TOKENIZER, 0, in_training=True)(wrong).sum() == pytest.approx(0.1)
    strict = PPOConfig(custom_reward_function=CustomRewardFunctionConfig(reward_kwargs={"format_score": 0}))
    assert load_reward_manager(strict, TOKENIZER, 0, in_training=True)(wrong).sum() == 0.0
    (tmp_path / "mine.py").write_text("def compute_score(bonus, **kwargs):\n    return bonus\n")
    custom = CustomRewardFunctionConfig(str(tmp_path / "mine.py"), reward_kwargs={"bonus": 7})
    assert load_reward_manager(PPOConfig(custom_reward_function=custom), TOKENIZER, 0)(data).sum() == 7.0


def test_load_reward_manager_rejects_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"reward_model\.reward_manager=niave.*Did you mean 'naive'"):
        load_reward_manager(PPOConfig(reward_model=RewardModelConfig(reward_manager="niave")), TOKENIZER, 0)
    odd = PPOConfig(reward_model=RewardModelConfig(reward_kwargs={"workers": 3}))
    with pytest.raises(ValueError, match=r"reward_model\.reward_kwargs=.*unexpected keyword argument 'workers'"):
        load_reward_manager(odd, TOKENIZER, 0)
    assert list(REWARD_MANAGERS) == ["batch", "dapo", "functions", "naive", "prime", "rate_limited"]


def with_file(folder: Path, source: str, manager: str = "naive", timeout_s: float = 300.0, **reward_kwargs: Any) -> Any:
    """The manager with the `compute_score` of a file."""
    path = folder / "reward_file.py"
    path.write_text(source)
    return load_reward_manager(
        PPOConfig(
            reward_model=RewardModelConfig(reward_manager=manager, reward_kwargs=reward_kwargs, timeout_s=timeout_s),
            custom_reward_function=CustomRewardFunctionConfig(str(path)),
        ),
        TOKENIZER,
        0,
    )


HANGS = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(10_000)
    if solution_str == "crash":
        os.abort()
    return {"score": 1.0, "acc": True}
"""


@pytest.mark.parametrize("manager", ["naive", "dapo", "prime"])
def test_hanging_and_crashing_functions_fail_only_their_samples(tmp_path: Path, manager: str) -> None:
    reward_fn = with_file(tmp_path, HANGS, manager, timeout_s=0.5, num_workers=2)
    result = reward_fn(make_batch(["a", "hang", "b", "crash", "c"]), return_dict=True)
    assert result["reward_tensor"].sum(dim=1).tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert result["reward_extra_info"]["reward_failed"] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert result["reward_extra_info"]["acc"] == [True, None, True, None, True]
    with pytest.raises(RuntimeError, match=r"failed on 1 of 1 samples.*reward_model\.timeout_s=0\.5"):
        reward_fn(make_batch(["hang"]))


def test_prime_scores_by_data_source_in_other_processes() -> None:
    data = make_batch(["#### 2", "#### 3", "Answer: 2"], sources=["openai/gsm8k", "openai/gsm8k", "aime24"])
    manager = PrimeRewardManager(TOKENIZER, 0, num_workers=1)
    result = manager(data, return_dict=True)
    assert result["reward_tensor"].sum(dim=1).tolist() == [1.0, 0.0, 1.0]
    assert result["reward_extra_info"]["pred"] == [None, None, "2"]
    with pytest.raises(ValueError, match="no scorer for data_source 'mine'"):
        manager(make_batch(["a"], sources=["mine"]))


def test_prime_rejects_functions_that_cannot_be_imported() -> None:
    with pytest.raises(ValueError, match="cannot be called in another process"):
        PrimeRewardManager(TOKENIZER, 0, lambda **_: 1.0)


def test_batch_function_sees_all_rows_at_once() -> None:
    seen: list[dict[str, Any]] = []

    def lengths(**columns: Any) -> list[Any]:
        seen.append(columns)
        return [{"score": len(text), "half": len(text) / 2} for text in columns["solution_strs"]]

    result = BatchRewardManager(TOKENIZER, 0, lengths)(make_batch(["a", "bbb"]), return_dict=True)
    assert result["reward_tensor"].sum(dim=1).tolist() == [1.0, 3.0]
    assert result["reward_extra_info"] == {"reward_failed": [0.0, 0.0], "half": [0.5, 1.5]}
    assert seen == [
        {
            "data_sources": ["openai/gsm8k"] * 2,
            "solution_strs": ["a", "bbb"],
            "ground_truths": ["2", "2"],
            "extra_infos": [{"index": 0}, {"index": 1}],
        }
    ]


def test_batch_function_that_fails_is_called_row_by_row() -> None:
    calls: list[int] = []

    def picky(solution_strs: list[str], **_: Any) -> list[Any]:
        calls.append(len(solution_strs))
        if "b" in solution_strs:
            raise KeyError("no b")
        return [ValueError("no c") if text == "c" else 1.0 for text in solution_strs]

    result = BatchRewardManager(TOKENIZER, 0, picky)(make_batch(["a", "b", "c", "d"]), return_dict=True)
    assert calls == [4, 1, 1, 1, 1]
    assert result["reward_tensor"].sum(dim=1).tolist() == [1.0, 0.0, 0.0, 1.0]
    assert result["reward_extra_info"] == {"reward_failed": [0.0, 1.0, 1.0, 0.0]}


def test_batch_function_that_hangs_stops_the_run(tmp_path: Path) -> None:
    source = "import time\ndef compute_score(**columns):\n    time.sleep(1000)\n"
    with pytest.raises(RewardHangError, match=r"reward_file\.py:3 in compute_score; 5 of 8 rows were waiting"):
        with_file(tmp_path, source, "batch", timeout_s=0.2)(make_batch(list("abcdefgh")))


def test_batch_manager_from_the_config(tmp_path: Path) -> None:
    data = make_batch(["#### 2", "bb"])
    config = PPOConfig(reward_model=RewardModelConfig(reward_manager="batch"))
    assert load_reward_manager(config, TOKENIZER, 0)(data).sum(dim=1).tolist() == [1.0, 0.0]
    arrays = "import numpy\ndef compute_score(solution_strs, **kw):\n    return numpy.ones(len(solution_strs))\n"
    assert with_file(tmp_path, arrays, "batch")(data).sum(dim=1).tolist() == [1.0, 1.0]
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"cannot be called with \(data_sources, solution_strs, .*missing"):
        with_file(tmp_path / "other", "def compute_score(data_source):\n    return 0\n", "batch")
    with pytest.raises(
        ValueError,
        match=r"<lambda> \(reward_model\.reward_manager=batch\) returned 1 scores for 2 rows; it must return a list",
    ):
        BatchRewardManager(TOKENIZER, 0, lambda **_: [1.0])(data)
    with pytest.raises(ValueError, match=r"returned a float for 2 rows"):
        BatchRewardManager(TOKENIZER, 0, lambda **_: 1.0)(data)


def test_dapo_penalty_grows_within_the_buffer() -> None:
    """At most 10 tokens, a buffer of 4, factor 2: 7 tokens cost a quarter of it, 10 tokens all."""
    buffer = {"enable": True, "len": 4, "penalty_factor": 2.0, "log": True}
    manager = DapoRewardManager(TOKENIZER, 0, lambda **_: 1.0, max_resp_len=10, overlong_buffer_cfg=buffer)
    result = manager(make_batch(["a", "a" * 5, "a" * 6, "a" * 9]), return_dict=True)
    assert result["reward_tensor"].sum(dim=1).tolist() == [1.0, 1.0, 0.5, -1.0]
    assert result["reward_extra_info"] == {
        "reward_failed": [0.0] * 4,
        "acc": [1.0] * 4,
        "overlong_reward": [0.0, 0.0, -0.5, -2.0],
        "overlong": [False, False, True, True],
    }


def test_dapo_without_a_buffer_is_naive_with_acc() -> None:
    outcomes = iter([0.5, {"score": 1.0, "acc": 0.0}, {"score": 2.0}])
    manager = DapoRewardManager(
        TOKENIZER, 0, lambda **_: next(outcomes), overlong_buffer_cfg={"enable": False, "len": 4}
    )
    result = manager(make_batch(["a", "b", "c"]), return_dict=True)
    assert result["reward_tensor"].sum(dim=1).tolist() == [0.5, 1.0, 2.0]
    assert result["reward_extra_info"]["acc"] == [0.5, 0.0, None]


def test_dapo_reads_max_response_length_from_the_data_section() -> None:
    def load(**buffer: Any) -> Any:
        model = RewardModelConfig(
            reward_manager="dapo", reward_kwargs={"overlong_buffer_cfg": {"enable": True, **buffer}}
        )
        return load_reward_manager(PPOConfig(reward_model=model), TOKENIZER, 0)

    assert load(len=4).max_resp_len == PPOConfig().data.max_response_length
    with pytest.raises(ValueError, match=r"overlong_buffer_cfg\.len=100000: must be between 1 and max_resp_len"):
        load(len=100_000)
    with pytest.raises(
        ValueError, match=r"overlong_buffer_cfg\.penality_factor: no such key. Did you mean 'penalty_factor'"
    ):
        load(len=4, penality_factor=1.0)
    with pytest.raises(
        ValueError, match=r"overlong_buffer_cfg\.enable needs reward_model\.reward_kwargs\.max_resp_len"
    ):
        DapoRewardManager(TOKENIZER, 0, overlong_buffer_cfg={"enable": True, "len": 4})


def test_custom_managers(tmp_path: Path) -> None:
    (tmp_path / "managers_of_mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key='data_source', **kwargs):\n"
        "        self.kwargs = kwargs\n"
        "    def __call__(self, data, return_dict=False):\n"
        "        return self.kwargs\n"
    )
    model = RewardModelConfig(reward_manager=f"{tmp_path}/managers_of_mine.py:Mine", reward_kwargs={"weight": 3})
    assert load_reward_manager(PPOConfig(reward_model=model), TOKENIZER, 0)(None) == {"weight": 3}


def test_rollout_columns_reach_the_function() -> None:
    seen: list[Any] = []
    columns = {"__num_turns__": [3], "reward_scores": [{"tool": 0.5}]}
    run(lambda extra_info, **_: seen.append(extra_info) or 0.0, make_batch(["a"], **columns))
    assert seen == [{"index": 0, "num_turns": 3, "rollout_reward_scores": {"tool": 0.5}}]


def test_which_managers_score_by_data_source() -> None:
    batch = PPOConfig(reward_model=RewardModelConfig(reward_manager="batch"))
    for config in (PPOConfig(), batch):
        for in_training in (True, False):
            assert scorer_options(load_reward_manager(config, TOKENIZER, 0, in_training).compute_score)
    assert not scorer_options(lambda **row: 1.0)


def turns_batch() -> DataProto:
    """Turns of the policy at the tokens 0-1, 4-5 and 9; another row with one turn at 0-6."""
    data = make_batch(["abcdefghi", "abcdef"])
    data.batch["response_mask"][0] = torch.tensor([1, 1, 0, 0, 1, 1, 0, 0, 0, 1])
    return data


def test_turn_rewards_are_at_the_end_of_their_turns() -> None:
    results = [{"score": 1.0, "turn_rewards": [0.25, -0.5, 0.125], "acc": 1.0}, {"turn_rewards": [2.0]}]
    manager = NaiveRewardManager(TOKENIZER, 0, lambda extra_info, **_: results[extra_info["index"]])
    result = manager(turns_batch(), return_dict=True)
    expected = torch.zeros(2, RESPONSE_LENGTH)
    expected[0, 1], expected[0, 5], expected[0, 9] = 0.25, -0.5, 1.125  # the score is at the last token too
    expected[1, 6] = 2.0
    assert torch.equal(result["reward_tensor"], expected)
    assert result["reward_tensor"].sum(-1).tolist() == [0.875, 2.0]  # what outcome estimators use: nothing counts twice
    assert result["reward_extra_info"] == {"reward_failed": [0.0, 0.0], "acc": [1.0, None]}


@pytest.mark.parametrize(
    "rewards, message",
    [
        ([1.0], "returned 1 turn_rewards for a response of 3 turns"),
        ([0.0, float("nan"), 0.0], "the turn reward nan; it must be finite"),
    ],
)
def test_turn_rewards_that_do_not_fit_stop_the_run(rewards: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(lambda **_: {"turn_rewards": rewards}, turns_batch())
    assert run(lambda **_: {"turn_rewards": [], "score": 1.0}, turns_batch())["reward_tensor"].sum() == 2
