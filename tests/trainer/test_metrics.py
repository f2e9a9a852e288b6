import numpy as np
import pytest
import torch

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    name_validation_metrics,
    process_validation_metrics,
)


def make_batch() -> DataProto:
    """Prompts of 1, 2 and 2 tokens; responses of 3 (the maximum), 1 and 0 tokens, the first with a tool token."""
    prompt_mask = torch.tensor([[0, 1], [1, 1], [1, 1]])
    written = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    return DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(3, 2, dtype=torch.int64),
            "responses": torch.zeros(3, 3, dtype=torch.int64),
            "attention_mask": torch.cat([prompt_mask, written], dim=1),
            "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0, 1], [3, 0, 0], [0, 0, 0]]),
            "token_level_rewards": torch.tensor([[0.0, 0, 0.5], [2, 0, 0], [0, 0, 0]]),
            "advantages": torch.tensor([[1.0, 99, 2], [3, 99, 99], [99, 99, 99]]),
            "returns": torch.tensor([[1.0, 99, 2], [6, 99, 99], [99, 99, 99]]),
            "values": torch.tensor([[1.0, 99, 2], [3, 99, 99], [99, 99, 99]]),
        },
        non_tensors={"__num_turns__": np.array([2, 4, 3], dtype=object)},
        meta_info={"global_token_num": [4, 3, 2]},
    )


@pytest.mark.parametrize("mask_type", [torch.int64, torch.bool, torch.bfloat16])
def test_data_metrics_by_hand(mask_type: torch.dtype) -> None:
    batch = make_batch()
    for name in ("attention_mask", "response_mask"):
        batch.tensors[name] = batch.tensors[name].to(mask_type)
    metrics = compute_data_metrics(batch, use_critic=True)
    want = {
        "critic/score/mean": 2.0,
        "critic/score/min": 1.0,
        "critic/rewards/mean": 1.25,
        "critic/advantages/mean": 2.0,
        "critic/advantages/max": 3.0,
        "critic/returns/mean": 3.0,
        "critic/values/mean": 2.0,
        "critic/vf_explained_var": 1 - 3.0 / 7.0,
        "response_length/mean": 4 / 3,
        "response_length/max": 3.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_non_aborted/mean": 2.0,
        "response_length_non_aborted/min": 1.0,
        "response_length_non_aborted/clip_ratio": 0.5,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/mean": 5 / 3,
        "prompt_length/clip_ratio": 2 / 3,
        "num_turns/mean": 3.0,
        "num_turns/max": 4.0,
    }
    assert {name: metrics[name] for name in want} == pytest.approx(want, abs=1e-5)


def test_groups_of_equal_scores() -> None:
    batch = make_batch()  # scores 1, 3, 0
    name = "critic/score/zero_variance_groups"
    assert name not in compute_data_metrics(batch)  # uid is not known
    for uids, share in ((["a", "b", "b"], 0.0), (["a", "a", "a"], 0.0), (["a", "b", "c"], None)):
        batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        assert compute_data_metrics(batch).get(name) == share
    six = DataProto.concat([batch, batch])
    six.non_tensor_batch["uid"] = np.array(["a", "b", "c", "a", "c", "b"], dtype=object)  # 1 1, 3 0, 0 3
    assert compute_data_metrics(six)[name] == pytest.approx(1 / 3)


def test_data_metrics_without_critic_or_any_response() -> None:
    data = make_batch()
    assert data.batch is not None
    metrics = compute_data_metrics(data, use_critic=False)
    assert not any(name.startswith(("critic/values", "critic/vf")) for name in metrics)
    data.batch["attention_mask"][:, 2:] = 0
    data.batch["response_mask"].zero_()
    metrics = compute_data_metrics(data, use_critic=True)
    assert metrics["response/aborted_ratio"] == 1.0
    assert metrics["critic/score/mean"] == 0.0
    assert all(np.isfinite(value) for value in metrics.values())


def test_timing_metrics_by_hand() -> None:
    metrics = compute_timing_metrics(make_batch(), {"gen": 2.0, "update_actor": 0.9, "step": 3.0})
    assert metrics == pytest.approx(
        {
            "timing_s/gen": 2.0,
            "timing_s/update_actor": 0.9,
            "timing_s/step": 3.0,
            "timing_per_token_ms/gen": 500.0,
            "timing_per_token_ms/update_actor": 100.0,
        }
    )


def test_throughput_by_hand() -> None:
    metrics = compute_throughout_metrics(make_batch(), {"step": 3.0}, n_gpus=2)
    assert metrics == {"perf/total_num_tokens": 9, "perf/time_per_step": 3.0, "perf/throughput": 1.5}


def test_single_response_has_only_the_mean() -> None:
    metrics = process_validation_metrics(
        ["a", "a", "b"], ["1", "2", "3"], {"reward": [1.0, 0.0, 1.0], "note": ["x"] * 3}
    )
    assert metrics == {"a": {"reward": {"mean@1": 0.5}}, "b": {"reward": {"mean@1": 1.0}}}


def test_validation_statistics_of_several_responses() -> None:
    reward = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    infos = {"reward": reward, "pred": ["x", "x", "x", "y", "y", "y", "y", "y"]}
    metrics = process_validation_metrics(["a"] * 8, ["1"] * 4 + ["2"] * 4, infos)["a"]["reward"]
    assert metrics["mean@4"] == pytest.approx((0.25 + 1.0) / 2)
    assert metrics["std@4"] == pytest.approx(np.std([0, 0, 0, 1]) / 2)
    # of the first prompt's answers a draw of n has none right with probability 0.75^n
    assert metrics["best@2/mean"] == pytest.approx((1 - 0.75**2 + 1) / 2, abs=0.03)
    assert metrics["best@4/mean"] == pytest.approx((1 - 0.75**4 + 1) / 2, abs=0.03)
    assert metrics["worst@4/mean"] == pytest.approx((0.25**4 + 1) / 2, abs=0.03)
    assert metrics["maj@4/mean"] < metrics["best@4/mean"]
    assert metrics == process_validation_metrics(["a"] * 8, ["1"] * 4 + ["2"] * 4, infos)["a"]["reward"]


def test_majority_takes_the_most_frequent_answer() -> None:
    infos = {"acc": [1.0, 1.0, 1.0, 0.0], "pred": ["7", "7", "7", "8"]}
    metrics = process_validation_metrics(["a"] * 4, ["1"] * 4, infos)["a"]["acc"]
    # 4 draws with replacement: wrong with 3 or 4 times "8", or in a tie of 2 to 2 that "8" opens
    wrong = 4 * 0.25**3 * 0.75 + 0.25**4 + 3 * 0.25**2 * 0.75**2
    assert metrics["maj@4/mean"] == pytest.approx(1 - wrong, abs=0.03)


def test_validation_names() -> None:
    metrics = {
        "math": {
            "acc": {"mean@4": 0.5, "best@2/mean": 0.6, "best@4/mean": 0.7, "best@4/std": 0.1},
            "reward": {"mean@4": 1.0},
        }
    }
    assert name_validation_metrics(metrics) == {
        "val-core/math/acc/mean@4": 0.5,
        "val-aux/math/acc/best@2/mean": 0.6,
        "val-core/math/acc/best@4/mean": 0.7,
        "val-aux/math/acc/best@4/std": 0.1,
        "val-aux/math/reward/mean@4": 1.0,
    }
    assert name_validation_metrics({"gsm8k": {"reward": {"mean@1": 1.0}}}) == {"val-core/gsm8k/reward/mean@1": 1.0}
