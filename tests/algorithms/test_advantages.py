import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    check_inputs,
    get_adv_estimator_fn,
    needs_groups,
    needs_values,
    parameters_of,
    register_adv_est,
    required_inputs,
)
from lockstep.config.algorithm import AlgoConfig
from lockstep.utils.groupwise import as_torch_index, group_mean_std
from lockstep.utils.masked import masked_mean, masked_var

UIDS = np.array(["b", "a", "b", "a", "b", "c"], dtype=object)
SCORES = [1.0, 0.0, 0.0, 3.0, 2.0, 5.0]


def outcome(scores: list[float], width: int = 3) -> tuple[Tensor, Tensor]:
    """Rewards at the last token of rows with 1, 2, 3, 1, 2, .. tokens, and their mask."""
    lengths = torch.tensor([1 + i % width for i in range(len(scores))])
    mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
    rewards = torch.zeros(len(scores), width)
    rewards[torch.arange(len(scores)), lengths - 1] = torch.tensor(scores)
    return rewards, mask


def per_row(advantages: Tensor, mask: Tensor) -> list[float]:
    """Each row's advantage, after checking that it is equal for all its tokens and 0 outside the mask."""
    assert (advantages * (1 - mask)).abs().sum() == 0
    assert torch.equal(advantages, advantages[:, :1] * mask)
    return advantages[:, 0].tolist()


def test_gae_by_hand() -> None:
    rewards = torch.tensor([[0.0, 1.0, 9.0]])
    values = torch.tensor([[0.5, 0.25, 7.0]])
    mask = torch.tensor([[1, 1, 0]])
    gamma, lam = 0.9, 0.8
    last = 1.0 - 0.25
    first = 0.0 + gamma * 0.25 - 0.5 + gamma * lam * last
    advantages, returns = get_adv_estimator_fn("gae")(
        token_level_rewards=rewards, values=values, response_mask=mask, gamma=gamma, lam=lam
    )
    assert returns.tolist() == [pytest.approx([first + 0.5, last + 0.25, 0.0])]
    spread = math.sqrt((first - last) ** 2 / 2)
    white = [(a - (first + last) / 2) / spread for a in (first, last)]
    assert advantages.tolist() == [pytest.approx([*white, 0.0], abs=1e-6)]


def test_gae_skips_tool_tokens() -> None:
    """Tool tokens in the middle of a row do not change the advantages of the others."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    keep = [0, 1, 4, 5]
    mask = torch.zeros(4, 6, dtype=torch.int64)
    mask[:, keep] = 1
    gae = get_adv_estimator_fn("gae")
    whole = gae(token_level_rewards=rewards, values=values, response_mask=mask, gamma=0.9, lam=0.7)
    cut = gae(
        token_level_rewards=rewards[:, keep],
        values=values[:, keep],
        response_mask=torch.ones(4, 4, dtype=torch.int64),
        gamma=0.9,
        lam=0.7,
    )
    for with_tools, without in zip(whole, cut):
        torch.testing.assert_close(with_tools[:, keep], without)


def test_grpo_by_hand() -> None:
    rewards, mask = outcome(SCORES)
    advantages, returns = get_adv_estimator_fn("grpo")(token_level_rewards=rewards, response_mask=mask, index=UIDS)
    std_a = 3 / math.sqrt(2)
    assert per_row(advantages, mask) == pytest.approx([0.0, -1.5 / std_a, -1.0, 1.5 / std_a, 1.0, 5.0], abs=1e-5)
    assert torch.equal(advantages, returns)


def test_dr_grpo_does_not_divide_by_the_deviation() -> None:
    rewards, mask = outcome(SCORES)
    advantages, _ = get_adv_estimator_fn("grpo")(
        token_level_rewards=rewards, response_mask=mask, index=UIDS, norm_adv_by_std_in_grpo=False
    )
    assert per_row(advantages, mask) == pytest.approx([0.0, -1.5, -1.0, 1.5, 1.0, 5.0])


GROUP_ESTIMATORS = [
    "grpo",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "maxrl",
    "reinforce_plus_plus_baseline",
    "gdpo",
]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize(("score", "size"), [(0.3, 8), (12.34, 16), (-1e4 / 3, 5), (0.1, 3)])
def test_equal_scores_give_exactly_zero(name: str, score: float, size: int) -> None:
    rewards, mask = outcome([score] * 2 * size)
    index = np.array(["a", "b"] * size)
    advantages, _ = get_adv_estimator_fn(name)(token_level_rewards=rewards, response_mask=mask, index=index)
    assert not advantages.any()


def test_passk_rewards_the_margin_of_the_best() -> None:
    rewards, mask = outcome(SCORES[:5])
    estimator = get_adv_estimator_fn("grpo_passk")
    config = AlgoConfig(norm_adv_by_std_in_grpo=False)
    advantages, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=UIDS[:5], config=config)
    assert per_row(advantages, mask) == pytest.approx([0.0, 0.0, 0.0, 3.0, 1.0])
    advantages, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=UIDS[:5])
    assert per_row(advantages, mask) == pytest.approx([0.0, 0.0, 0.0, math.sqrt(2), 1.0], abs=1e-5)


def test_passk_refuses_a_group_of_one() -> None:
    rewards, mask = outcome(SCORES)
    with pytest.raises(ValueError, match=r"grpo_passk needs at least 2 samples.*actor_rollout_ref\.rollout\.n"):
        get_adv_estimator_fn("grpo_passk")(token_level_rewards=rewards, response_mask=mask, index=UIDS)


@pytest.mark.parametrize(("name", "alone"), [("rloo", 5.0), ("rloo_vectorized", 0.0)])
def test_rloo_by_hand(name: str, alone: float) -> None:
    rewards, mask = outcome(SCORES)
    advantages, _ = get_adv_estimator_fn(name)(token_level_rewards=rewards, response_mask=mask, index=UIDS)
    assert per_row(advantages, mask) == pytest.approx([0.0, -3.0, -1.5, 3.0, 1.5, alone])


def test_opo_by_hand() -> None:
    rewards, mask = outcome(SCORES)  # lengths 1, 2, 3, 1, 2, 3
    advantages, _ = get_adv_estimator_fn("opo")(token_level_rewards=rewards, response_mask=mask, index=UIDS)
    base_b, base_a = (1 * 1 + 3 * 0 + 2 * 2) / 6, (2 * 0 + 1 * 3) / 3
    want = [1 - base_b, 0 - base_a, 0 - base_b, 3 - base_a, 2 - base_b, 5.0]
    assert per_row(advantages, mask) == pytest.approx(want)


def test_gpg_by_hand() -> None:
    rewards, mask = outcome(SCORES)
    advantages, _ = get_adv_estimator_fn("gpg")(token_level_rewards=rewards, response_mask=mask, index=UIDS, f_norm=2.0)
    alpha = 6 / 4
    want = [alpha * centred / 2.0 for centred in (0.0, -1.5, -1.0, 1.5, 1.0, 5.0)]
    assert per_row(advantages, mask) == pytest.approx(want)


def test_reinforce_plus_plus_discounts_own_tokens_only() -> None:
    rewards = torch.tensor([[0.0, 5.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    advantages, returns = get_adv_estimator_fn("reinforce_plus_plus")(
        token_level_rewards=rewards, response_mask=mask, config=AlgoConfig(gamma=0.5)
    )
    assert returns.tolist() == [[0.25, 0.0, 0.5, 1.0], [2.0, 0.0, 0.0, 0.0]]
    assert masked_mean(advantages, mask).item() == pytest.approx(0.0, abs=1e-6)
    assert masked_var(advantages, mask).item() == pytest.approx(1.0, abs=1e-4)
    assert (advantages * (1 - mask)).abs().sum() == 0


def test_reinforce_plus_plus_baseline_is_whitened_centred_scores() -> None:
    rewards, mask = outcome(SCORES)
    advantages, _ = get_adv_estimator_fn("reinforce_plus_plus_baseline")(
        token_level_rewards=rewards, response_mask=mask, index=UIDS
    )
    centred = torch.tensor([0.0, -1.5, -1.0, 1.5, 1.0, 5.0]).unsqueeze(1).expand(6, 3)[mask.bool()]
    torch.testing.assert_close(advantages[mask.bool()], (centred - centred.mean()) / centred.std())


def test_remax_subtracts_the_greedy_score() -> None:
    rewards, mask = outcome([1.0, 4.0])
    advantages, returns = get_adv_estimator_fn("remax")(
        token_level_rewards=rewards, response_mask=mask, reward_baselines=torch.tensor([0.5, 5.0])
    )
    assert advantages.tolist() == [[0.5, 0.0, 0.0], [-1.0, -1.0, 0.0]]
    assert returns.tolist() == [[1.0, 0.0, 0.0], [4.0, 4.0, 0.0]]


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_row_order_does_not_matter_and_inputs_are_not_modified(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(8, 5, generator=generator)
    mask = (torch.arange(5) < torch.tensor([5, 1, 3, 2, 4, 5, 2, 1]).unsqueeze(1)).long()
    rewards = rewards * mask
    inputs = {
        "values": torch.randn(8, 5, generator=generator),
        "index": np.array(["x", "y", "x", "z", "y", "z", "x", "y"], dtype=object),
        "reward_baselines": torch.randn(8, generator=generator),
        "old_log_probs": -torch.rand(8, 5, generator=generator),
        "sum_pi_squared": torch.rand(8, 5, generator=generator),
        "entropys": torch.rand(8, 5, generator=generator),
        "gamma": 0.9,
        "lam": 0.8,
    }
    order = torch.randperm(8, generator=generator)
    before = rewards.clone()
    estimator = get_adv_estimator_fn(name)
    advantages, returns = estimator(token_level_rewards=rewards, response_mask=mask, **inputs)
    assert torch.equal(rewards, before)
    shuffled = {
        k: v if isinstance(v, float) else v[order] if torch.is_tensor(v) else v[order.numpy()]
        for k, v in inputs.items()
    }
    advantages_2, returns_2 = estimator(token_level_rewards=rewards[order], response_mask=mask[order], **shuffled)
    torch.testing.assert_close(advantages_2, advantages[order])
    torch.testing.assert_close(returns_2, returns[order])
    for out in (advantages, returns):
        assert (out * (1 - mask)).abs().sum() == 0


def test_group_statistics() -> None:
    ids = as_torch_index(UIDS)
    assert ids.tolist() == [0, 1, 0, 1, 0, 2]
    mean, std, count = group_mean_std(torch.tensor(SCORES), ids)
    assert mean.tolist() == [1.0, 1.5, 0.0]
    assert std.tolist() == pytest.approx([1.0, 3 / math.sqrt(2), 1.0])
    assert count.tolist() == [3, 2, 1]
    _, floored, _ = group_mean_std(torch.ones(2), torch.tensor([0, 0]), eps=1e-6)
    assert floored.tolist() == pytest.approx([1e-3])


def test_maxrl_by_hand() -> None:
    rewards, mask = outcome([1.0, 0.0, 0.0, 0.0, 0.0, -1.0, 3.0])
    index = np.array(["a", "a", "a", "a", "b", "b", "c"])
    advantages, returns = get_adv_estimator_fn("maxrl")(token_level_rewards=rewards, response_mask=mask, index=index)
    # one success of four counts 3; a group without success, below 0 or of one has nothing to say
    assert per_row(advantages, mask) == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0], abs=1e-4)
    assert torch.equal(advantages, returns)


def test_egpo_adds_entropy_up_to_a_part_of_the_advantage() -> None:
    rewards, mask = outcome([1.0, 0.0, 0.0, 5.0, 5.0])
    index = np.array(["a", "a", "a", "b", "b"])
    entropys = torch.tensor([0.1, 0.3, 9.0, 1.0, 1.0]).unsqueeze(1).expand(5, 3).clone()
    entropys[mask == 0] = 100.0
    estimator = get_adv_estimator_fn("egpo")
    advantages, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=index, entropys=entropys)
    base, _ = get_adv_estimator_fn("grpo")(token_level_rewards=rewards, response_mask=mask, index=index)
    a = base[:, 0].tolist()
    assert a[1] == pytest.approx(-1 / math.sqrt(3), abs=1e-4)
    want = [a[0] + 0.4 * 0.1, a[1] + 0.4 * abs(a[1]) / 2, a[2] + 0.4 * abs(a[2]) / 2, 0.0, 0.0]
    assert per_row(advantages, mask) == pytest.approx(want, abs=1e-6)
    config = AlgoConfig(egpo_lambda=1.0, egpo_alpha=1.0)
    advantages, _ = estimator(
        token_level_rewards=rewards, response_mask=mask, index=index, entropys=entropys, config=config
    )
    assert advantages[2, 0].item() == pytest.approx(0.0, abs=1e-6)  # at most |A|: the sign stays


def test_gdpo_normalizes_each_reward_separately() -> None:
    rewards, mask = outcome([0.0] * 4)
    index = np.array(["a", "a", "b", "b"])
    columns = {"right": np.array([1, 0, 1, 0], dtype=object), "short": np.array([100.0, 0.0, 0.0, 100.0], dtype=object)}
    config = AlgoConfig(gdpo_reward_keys=["right", "short"], gdpo_reward_weights=[1.0, 0.5])
    advantages, _ = get_adv_estimator_fn("gdpo")(
        token_level_rewards=rewards, response_mask=mask, index=index, config=config, non_tensor_batch=columns
    )
    one = 1 / math.sqrt(2)  # of two samples each is one deviation / sqrt 2 off the mean, whatever the unit
    total = torch.tensor([1.5, -1.5, 0.5, -0.5]).unsqueeze(1).expand(4, 3)[mask.bool()] * one
    torch.testing.assert_close(advantages[mask.bool()], (total - total.mean()) / total.std(), atol=1e-4, rtol=1e-4)


def test_gdpo_reports_invalid_keys() -> None:
    rewards, mask = outcome([0.0, 1.0])
    columns = {"acc": np.array([1.0, float("nan")], dtype=object), "text": np.array(["a", "b"], dtype=object)}

    def run(**keys: list[str] | list[float]) -> None:
        get_adv_estimator_fn("gdpo")(
            token_level_rewards=rewards,
            response_mask=mask,
            index=np.array([0, 0]),
            config=AlgoConfig(**keys),  # type: ignore[arg-type]
            non_tensor_batch=columns,
        )

    with pytest.raises(ValueError, match=r"gdpo_reward_keys contains 'ac', which the reward.*Did you mean 'acc'"):
        run(gdpo_reward_keys=["ac"])
    with pytest.raises(ValueError, match="'acc' contains a non-finite value"):
        run(gdpo_reward_keys=["acc"])
    with pytest.raises(ValueError, match="'text' must be one number per row"):
        run(gdpo_reward_keys=["text"])
    with pytest.raises(ValueError, match=r"gdpo_reward_weights=\[1\.0, 2\.0\]: needs one weight per key"):
        run(gdpo_reward_keys=["acc"], gdpo_reward_weights=[1.0, 2.0])


def otb_inputs(mask: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    rewards, noise, squares = torch.rand(3, *mask.shape, generator=generator)
    return {"token_level_rewards": rewards * mask, "old_log_probs": -noise, "sum_pi_squared": squares}


def test_optimal_token_baseline_by_a_loop() -> None:
    lengths = [4, 2, 3, 3, 1]
    mask = (torch.arange(5) < torch.tensor(lengths).unsqueeze(1)).long()
    given, index = otb_inputs(mask), np.array(["a", "a", "a", "b", "c"])
    advantages, returns = get_adv_estimator_fn("optimal_token_baseline")(response_mask=mask, index=index, **given)
    energy = 1 - 2 * given["old_log_probs"].exp() + given["sum_pi_squared"]
    for row, length in enumerate(lengths):
        for t in range(length):
            togo = {i: given["token_level_rewards"][i, t:].sum() for i in range(3)}
            spent = {i: energy[i, : t + 1].sum() for i in range(3) if t < lengths[i]}
            baseline = sum(togo[i] * w for i, w in spent.items()) / (sum(spent.values()) + 1e-8)
            if row > 2 or t == 3:  # alone in the group, or alone at the position
                baseline = 0.0
            own = given["token_level_rewards"][row, t:].sum()
            assert returns[row, t].item() == pytest.approx(own.item(), abs=1e-6)
            assert advantages[row, t].item() == pytest.approx((own - baseline).item(), abs=1e-5)


def test_tir_optimal_token_baseline_skips_tool_tokens() -> None:
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [1, 1, 0, 1, 0, 0]])
    given, index = otb_inputs(mask), np.array([0, 0])
    places = torch.tensor([[0, 3, 4], [0, 1, 3]])
    cut = {name: value.gather(1, places) for name, value in given.items()}
    with_tools, _ = get_adv_estimator_fn("tir_optimal_token_baseline")(response_mask=mask, index=index, **given)
    without, _ = get_adv_estimator_fn("optimal_token_baseline")(
        response_mask=torch.ones(2, 3, dtype=torch.int64), index=index, **cut
    )
    torch.testing.assert_close(with_tools.gather(1, places), without)
    assert (with_tools * (1 - mask)).abs().sum() == 0


def test_missing_inputs_are_reported_before_training() -> None:
    check_inputs("egpo", {"index", "entropys"})
    check_inputs("gae", {"values"})
    with pytest.raises(
        ValueError, match=r"adv_estimator=egpo needs batch keys that this run does not compute: entropys \("
    ):
        check_inputs("egpo", {"index"})
    with pytest.raises(
        ValueError, match=r"sum_pi_squared \(set actor_rollout_ref\.actor\.calculate_sum_pi_squared=true"
    ):
        check_inputs("optimal_token_baseline", {"index", "old_log_probs"})
    with pytest.raises(ValueError, match=r"reward_baselines \(they come from a greedy rollout"):
        check_inputs("remax", set())
    assert required_inputs("optimal_token_baseline") >= {"old_log_probs", "sum_pi_squared", "index"}


def test_needs_of_estimators() -> None:
    assert needs_values("gae") and not needs_groups("gae")
    assert needs_groups("grpo") and not needs_values("grpo")
    assert not needs_values("reinforce_plus_plus") and not needs_groups("reinforce_plus_plus")
    assert "reward_baselines" in required_inputs("remax")


def test_estimator_can_be_any_callable() -> None:
    @dataclass
    class Estimator:
        factor: float

        def __call__(self, token_level_rewards: Tensor, response_mask: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return self.factor * token_level_rewards, token_level_rewards

    assert [p.name for p in parameters_of(Estimator(2.0))] == ["token_level_rewards", "response_mask", "kwargs"]


@pytest.mark.usefixtures("no_registrations")
def test_registry_names() -> None:
    assert set(ADVANTAGE_ESTIMATORS) == {member.value for member in AdvantageEstimator}
    assert get_adv_estimator_fn(AdvantageEstimator.GAE) is get_adv_estimator_fn("gae")
    with pytest.raises(
        ValueError, match=r"algorithm\.adv_estimator=grop: no such advantage estimator\. Did you mean 'grpo'"
    ):
        get_adv_estimator_fn("grop")
    with pytest.raises(ValueError, match="'gae' is already registered"):
        register_adv_est("gae")(lambda **kwargs: (torch.zeros(1), torch.zeros(1)))
