from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from lockstep.algorithms.advantages import get_adv_estimator_fn
from lockstep.algorithms.compute_advantage import compute_advantage, compute_response_mask
from lockstep.config.algorithm import AlgoConfig
from lockstep.protocol import DataProto


def make_batch(**extra: Tensor) -> DataProto:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    rewards = torch.tensor([[0.0, 0, 1], [0, 0, 0], [2, 0, 0], [0, 0, 3]])
    return DataProto.from_dict(
        tensors={
            "responses": torch.zeros(4, 3, dtype=torch.int64),
            "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.int64), mask], dim=1),
            "token_level_rewards": rewards,
            **extra,
        },
        non_tensors={"uid": np.array(["p", "p", "q", "q"], dtype=object)},
    )


def test_response_mask_is_the_tail_of_the_attention_mask() -> None:
    assert compute_response_mask(make_batch()).tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]


def test_advantages_are_written_and_groups_are_found_by_uid() -> None:
    data = compute_advantage(make_batch(), "grpo", norm_adv_by_std_in_grpo=False)
    assert data.batch is not None
    assert data.batch["advantages"].tolist() == [[0.5] * 3, [-0.5, -0.5, 0.0], [-0.5, 0.0, 0.0], [0.5] * 3]
    assert data.batch["response_mask"].tolist() == compute_response_mask(data).tolist()


def test_gae_gets_gamma_lam_and_values() -> None:
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    data = compute_advantage(make_batch(values=values), "gae", gamma=0.9, lam=0.5)
    assert data.batch is not None
    advantages, returns = get_adv_estimator_fn("gae")(
        token_level_rewards=data.batch["token_level_rewards"],
        values=values,
        response_mask=data.batch["response_mask"],
        gamma=0.9,
        lam=0.5,
    )
    assert torch.equal(data.batch["advantages"], advantages)
    assert torch.equal(data.batch["returns"], returns)


def test_gamma_reaches_estimators_that_read_a_config() -> None:
    by_argument = compute_advantage(make_batch(), "reinforce_plus_plus", gamma=0.5)
    by_config = compute_advantage(make_batch(), "reinforce_plus_plus", config=AlgoConfig(gamma=0.5))
    assert by_argument.batch is not None and by_config.batch is not None
    assert by_argument.batch["returns"][0].tolist() == [0.25, 0.5, 1.0]
    assert torch.equal(by_argument.batch["returns"], by_config.batch["returns"])


def test_missing_batch_keys_are_reported() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.adv_estimator=gae needs batch keys that are missing: values"):
        compute_advantage(make_batch(), "gae")
    with pytest.raises(ValueError, match="reward_baselines"):
        compute_advantage(make_batch(), "remax")
    data = make_batch()
    data.non_tensor_batch.pop("uid")
    with pytest.raises(ValueError, match="are missing: uid"):
        compute_advantage(data, "grpo")


def raw_scores(token_level_rewards: Tensor, response_mask: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """An outside estimator that reads the groups from its keyword arguments."""
    assert list(kwargs["index"]) == ["p", "p", "q", "q"]
    scores = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return scores, scores


def bare(token_level_rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    return token_level_rewards, token_level_rewards


@pytest.mark.parametrize(("function", "first"), [("raw_scores", [1.0, 1.0, 1.0]), ("bare", [0.0, 0.0, 1.0])])
def test_outside_estimators(function: str, first: list[float]) -> None:
    data = compute_advantage(make_batch(), f"{__file__}:{function}")
    assert data.batch is not None and data.batch["advantages"][0].tolist() == first


def one_number_per_row(token_level_rewards: Tensor, **_: Any) -> Tensor:
    return token_level_rewards.sum(-1)


def test_an_estimator_that_returns_something_else_is_named() -> None:
    expected = (
        r"one_number_per_row \(.*py:\d+\) must return \(advantages, returns\).*\(4, 3\); it returned Tensor of .*\(4,\)"
    )
    with pytest.raises(ValueError, match=expected):
        compute_advantage(make_batch(), f"{__name__}:one_number_per_row")


def scaled_scores(
    token_level_rewards: Tensor, response_mask: Tensor, *, scale: float, shift: float = 0.0, **_: Any
) -> tuple[Tensor, Tensor]:
    advantages = scale * token_level_rewards * response_mask + shift
    return advantages, advantages


def test_settings_reach_an_estimator() -> None:
    """From a config of ours and from a verl program's own."""
    for config in (AlgoConfig(adv_kwargs={"scale": 2}), OmegaConf.create({"adv_kwargs": {"scale": "2"}})):
        data = compute_advantage(make_batch(), f"{__name__}:scaled_scores", config=config)  # type: ignore[arg-type]
        assert data.batch is not None
        assert data.batch["advantages"][:, -1].tolist() == [2, 0, 0, 6]
    with pytest.raises(ValueError, match=r"algorithm\.adv_kwargs\.scale: must be set; scaled_scores needs it"):
        compute_advantage(make_batch(), f"{__name__}:scaled_scores")
    with pytest.raises(ValueError, match=r"algorithm\.adv_kwargs\.scale=2: .* takes no settings"):
        compute_advantage(make_batch(), "grpo", config=AlgoConfig(adv_kwargs={"scale": 2}))
