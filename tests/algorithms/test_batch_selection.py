from typing import Any

import numpy as np
import pytest
import torch

from lockstep.algorithms.filtering import keep_informative_groups
from lockstep.algorithms.pf_ppo import compute_pf_ppo_reweight_data, pf_ppo_weights
from lockstep.protocol import DataProto, object_array


def batch(scores: list[float], uids: str, **columns: list[Any]) -> DataProto:
    rewards = torch.zeros(len(scores), 3)
    rewards[:, 1] = torch.tensor(scores)
    return DataProto.from_dict(
        tensors={"token_level_scores": rewards, "row": torch.arange(len(scores))},
        non_tensors={"uid": object_array(list(uids)), **{k: object_array(v) for k, v in columns.items()}},
    )


def test_groups_with_equal_scores_are_dropped() -> None:
    data = batch([1.0, 0.0, 1.0, 1.0, 1.0, 0.5], "abcacb")
    assert keep_informative_groups(data) == [1, 5]
    for metric in (None, "score", "seq_reward"):
        assert keep_informative_groups(data, metric) == [1, 5]


def test_a_group_of_one_is_kept() -> None:
    assert keep_informative_groups(batch([1.0, 1.0, 1.0], "aab")) == [2]


def test_groups_by_another_metric() -> None:
    data = batch([1.0, 0.0, 1.0, 1.0], "aabb", acc=[True, True, False, True])
    assert keep_informative_groups(data, "acc") == [2, 3]
    data.tensors["token_level_rewards"] = torch.tensor([[1.0], [1.0], [0.5], [0.7]])
    assert keep_informative_groups(data, "seq_final_reward") == [2, 3]


def test_missing_metric() -> None:
    data = batch([1.0, 0.0], "aa", acc=[1.0, 0.0], note=["x", "y"])
    with pytest.raises(ValueError, match=r"filter_groups\.metric=acs: .* Did you mean 'acc'"):
        keep_informative_groups(data, "acs")
    with pytest.raises(ValueError, match="metric=note: must be one number per row"):
        keep_informative_groups(data, "note")
    with pytest.raises(ValueError, match="token_level_rewards is not computed yet"):
        keep_informative_groups(data, "seq_final_reward")


def test_weights_of_pf_ppo() -> None:
    scores = torch.tensor([2.0, -1.0, 0.0, 1.0])
    assert pf_ppo_weights(scores, "pow", 2.0).tolist() == pytest.approx([4.0, 1.0, 1e-8, 1.0])
    assert pf_ppo_weights(scores, "max_min").tolist() == pytest.approx([1.0, 1.0, 1e-8, 1e-8])
    assert pf_ppo_weights(scores, "max_random").tolist() == pytest.approx([0.4, 0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match=r"algorithm\.pf_ppo\.reweight_method=power: no such method"):
        pf_ppo_weights(scores, "power")


def test_rows_are_sampled_by_weight() -> None:
    data = batch([2.0, 1.0, 0.0] * 400, "abc" * 400)
    drawn = compute_pf_ppo_reweight_data(data, "pow", 1.0, seed=1)
    assert len(drawn) == 1200
    shares = np.bincount(drawn.tensors["row"].numpy() % 3, minlength=3) / 1200
    assert shares.tolist() == pytest.approx([2 / 3, 1 / 3, 0.0], abs=0.05)
    for row, uid in zip(drawn.tensors["row"].tolist(), drawn.non_tensor_batch["uid"]):
        assert uid == "abc"[row % 3]
    again = compute_pf_ppo_reweight_data(data, "pow", 1.0, seed=1)
    assert torch.equal(again.tensors["row"], drawn.tensors["row"])


def test_zero_scores_are_equally_likely() -> None:
    drawn = compute_pf_ppo_reweight_data(batch([0.0] * 100, "a" * 100), seed=0)
    assert len(set(drawn.tensors["row"].tolist())) > 50
