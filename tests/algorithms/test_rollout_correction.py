import math
from typing import Any

import pytest
import torch

from lockstep.algorithms.rollout_correction import (
    apply_rollout_correction,
    compute_rollout_correction_and_rejection_mask,
    use_rollout_log_probs,
)
from lockstep.config.algorithm import RolloutCorrectionConfig
from lockstep.protocol import DataProto

# log r of the tokens; the last of the second row is padding
LOG_RATIO = torch.tensor([[0.5, -1.0, 1.5], [0.1, -0.2, 9.0]])
ROLLOUT = torch.tensor([[-2.0, -1.0, -3.0], [-0.5, -0.3, -9.5]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
RATIO = LOG_RATIO.exp()


def correct(**given: Any) -> tuple[Any, Any, dict[str, float]]:
    batch, mask, metrics = compute_rollout_correction_and_rejection_mask(ROLLOUT + LOG_RATIO, ROLLOUT, MASK, **given)
    weights = None if batch is None else batch.tensors["rollout_is_weights"]
    return weights, mask.tolist(), metrics


def test_token_weights_are_truncated() -> None:
    weights, mask, metrics = correct(rollout_is="token", rollout_is_threshold=2.0)
    want = [[math.exp(0.5), math.exp(-1.0), 2.0], [math.exp(0.1), math.exp(-0.2), 0.0]]
    assert weights.tolist() == [pytest.approx(row) for row in want]
    assert mask == MASK.tolist()
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(sum(map(sum, want)) / 5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 5)
    assert metrics["rollout_corr/rollout_is_max"] == 2.0


def test_two_bounds_set_weights_outside_to_0() -> None:
    weights, _, metrics = correct(rollout_is="token", rollout_is_threshold="0.5_2.0")
    assert weights[0].tolist() == pytest.approx([math.exp(0.5), 0.0, 0.0])
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 5)


def test_sequence_weights_are_the_product() -> None:
    weights, _, metrics = correct(rollout_is="sequence", rollout_is_threshold=5.0)
    first, second = math.exp(1.0), math.exp(-0.1)
    assert weights.tolist() == [pytest.approx([first] * 3), pytest.approx([second, second, 0.0])]
    weights, _, metrics = correct(rollout_is="sequence", rollout_is_threshold=5.0, rollout_is_batch_normalize=True)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx((first + second) / 2)
    assert weights[0, 0].item() == pytest.approx(2 * first / (first + second))


@pytest.mark.parametrize(
    ("rejection", "threshold", "want"),
    [
        ("token_k1", "0.4_2.0", [[1, 0, 0], [1, 1, 0]]),  # -log r within (log 0.4, log 2)
        ("token_k1", 2.0, [[1, 0, 0], [1, 1, 0]]),  # (1 / 2, 2)
        ("token_k2", 0.6, [[1, 1, 0], [1, 1, 0]]),
        ("token_k3", 0.2, [[1, 0, 0], [1, 1, 0]]),
        ("seq_sum_k1", "0.5_2.0", [[0, 0, 0], [1, 1, 0]]),  # sums -1 and 0.1
        ("seq_mean_k1", "0.5_2.0", [[1, 1, 1], [1, 1, 0]]),
        ("seq_mean_k2", 0.5, [[0, 0, 0], [1, 1, 0]]),  # (0.125 + 0.5 + 1.125) / 3
        ("seq_max_k2", 1.0, [[0, 0, 0], [1, 1, 0]]),
        ("token_k2, seq_max_k3", "0.6, 0.01", [[0, 0, 0], [0, 0, 0]]),
        ("token_k2,token_k3", 0.6, [[1, 1, 0], [1, 1, 0]]),
    ],
)
def test_rejection(rejection: str, threshold: Any, want: list[list[int]]) -> None:
    weights, mask, metrics = correct(rollout_rs=rejection, rollout_rs_threshold=threshold)
    assert weights is None and mask == want
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - sum(map(sum, want)) / 5)


def test_distance_metrics_by_hand() -> None:
    _, _, metrics = correct()
    own = LOG_RATIO[MASK.bool()]
    assert metrics["rollout_corr/kl"] == pytest.approx(-own.mean().item())
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((own.exp() - own - 1).mean().item(), rel=1e-5)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((2 * own).exp().mean().item() - 1, rel=1e-5)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx((math.exp(2.0) + math.exp(-0.2)) / 2 - 1, rel=1e-5)
    assert metrics["rollout_corr/rollout_ppl"] == pytest.approx((math.exp(2.0) + math.exp(0.4)) / 2, rel=1e-5)
    assert metrics["rollout_corr/log_ppl_diff_max"] == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout_is": "row"}, r"rollout_is=row: must be one of token, sequence"),
        (
            {"rollout_is": "token", "rollout_is_threshold": -1.0},
            r"rollout_is_threshold=-1\.0: must be a number above 0",
        ),
        ({"rollout_is": "token", "rollout_is_threshold": "3_2"}, r"rollout_is_threshold=3_2: must be a number above 0"),
        (
            {"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0},
            r"no such rejection criterion\. Did you mean 'token_k",
        ),
        ({"rollout_rs": "token_k2"}, r"rollout_rs_threshold=None: must be one threshold, or one per criterion of"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, r"must be a number above 0 for token_k2"),
        (
            {"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "1,2,3"},
            r"or one per criterion of .*rollout_rs=token_k2,token_k3",
        ),
    ],
)
def test_invalid_settings_name_their_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correct(**given)


def test_shapes_and_empty_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        compute_rollout_correction_and_rejection_mask(ROLLOUT, ROLLOUT[:, :2], MASK)
    with pytest.raises(ValueError, match="at least one token with response_mask 1"):
        compute_rollout_correction_and_rejection_mask(ROLLOUT, ROLLOUT, MASK * 0)


def batch() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "old_log_probs": ROLLOUT + LOG_RATIO,
            "rollout_log_probs": ROLLOUT.clone(),
            "response_mask": MASK.clone(),
        }
    )


def test_correction_of_a_batch() -> None:
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.6)
    data, metrics = apply_rollout_correction(batch(), config)
    assert data.tensors["response_mask"].tolist() == [[1, 1, 0], [1, 1, 0]]
    assert data.tensors["response_mask"].dtype == torch.int64
    assert data.tensors["rollout_is_weights"][0, 2] == 2.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 5)
    data, metrics = apply_rollout_correction(batch(), RolloutCorrectionConfig())
    assert metrics == {} and "rollout_is_weights" not in data.tensors


def test_bypass_takes_the_rollouts_log_probs() -> None:
    data = use_rollout_log_probs(batch())
    assert torch.equal(data.tensors["old_log_probs"], ROLLOUT)
    data.batch = data.tensors.exclude("rollout_log_probs")
    with pytest.raises(ValueError, match=r"rollout\.calculate_log_probs=true"):
        use_rollout_log_probs(data)
