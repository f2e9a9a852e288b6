import math

import pytest
import torch

from lockstep.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
)
from lockstep.config.algorithm import KLControlConfig
from lockstep.protocol import DataProto

LOG_PROB = torch.tensor([[-1.0, -2.0]])
REF = torch.tensor([[-1.5, -1.0]])


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (("kl", "k1"), [0.5, -1.0]),
        (("abs",), [0.5, 1.0]),
        (("mse", "k2"), [0.125, 0.5]),
        (("low_var_kl", "k3"), [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]),
    ],
)
def test_estimators_by_hand(names: tuple[str, ...], want: list[float]) -> None:
    for name in names:
        assert kl_penalty(LOG_PROB, REF, name).tolist() == [pytest.approx(want)]
        assert kl_penalty(LOG_PROB, REF, name + "+").tolist() == [pytest.approx(want)]


@pytest.mark.parametrize("name", ["k1+", "abs+", "k2+", "k3+", "low_var_kl+"])
def test_plus_takes_the_gradient_of_k2(name: str) -> None:
    log_prob = LOG_PROB.clone().requires_grad_(True)
    kl_penalty(log_prob, REF, name).sum().backward()
    assert log_prob.grad is not None and log_prob.grad.tolist() == [pytest.approx([0.5, -1.0])]


def test_low_var_kl_is_bounded() -> None:
    far = kl_penalty(torch.tensor([-500.0]), torch.tensor([0.0]), "k3")
    assert far.item() == 10.0


def test_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match=r"kl_loss_type=low_var: no such KL estimator\. Did you mean 'low_var_kl'"):
        kl_penalty(LOG_PROB, REF, "low_var")


def test_monte_carlo_estimates_agree_with_the_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.log_softmax(torch.randn(2, 6, generator=generator), dim=-1)
    exact = (policy.exp() * (policy - reference)).sum().item()
    tokens = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    for name in ("k1", "k3"):
        assert kl_penalty(policy[tokens], reference[tokens], name).mean().item() == pytest.approx(exact, rel=0.02)


def test_controllers() -> None:
    fixed = get_kl_controller(KLControlConfig(kl_coef=0.3))
    fixed.update(current_kl=9.0, n_steps=64)
    assert isinstance(fixed, FixedKLController) and fixed.value == 0.3

    adaptive = get_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=1000))
    assert isinstance(adaptive, AdaptiveKLController)
    adaptive.update(current_kl=0.11, n_steps=100)  # 10 % above the target
    assert adaptive.value == pytest.approx(0.2 * (1 + 0.1 * 100 / 1000))
    before = adaptive.value
    adaptive.update(current_kl=50.0, n_steps=100)  # the error counts as 20 % at most
    assert adaptive.value == pytest.approx(before * 1.02)
    adaptive.update(current_kl=0.0, n_steps=100)
    assert adaptive.value == pytest.approx(before * 1.02 * 0.98)


def test_wrong_controllers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.kl_ctrl\.type=weird"):
        get_kl_controller(KLControlConfig(type="weird"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"algorithm\.kl_ctrl\.horizon=0"):
        get_kl_controller(KLControlConfig(type="adaptive", horizon=0))
    with pytest.raises(ValueError, match=r"algorithm\.kl_ctrl\.target_kl=0"):
        get_kl_controller(KLControlConfig(type="adaptive", target_kl=0.0))


def test_compute_rewards_by_hand() -> None:
    rewards = compute_rewards(torch.tensor([[0.0, 1.0]]), LOG_PROB, REF, kl_ratio=0.1)
    assert rewards.tolist() == [pytest.approx([-0.05, 1.1])]


def test_penalty_on_a_batch() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    data = DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "old_log_probs": torch.tensor([[-1.0, -2.0], [-1.0, -7.0], [-3.0, -3.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -1.0], [-2.0, -1.0], [-1.0, -1.0]]),
            "token_level_scores": torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]]),
        }
    )
    controller = AdaptiveKLController(0.1, target_kl=0.25, horizon=30)
    data, metrics = apply_kl_penalty(data, controller, "kl")
    assert data.batch is not None
    assert data.batch["token_level_rewards"].tolist() == [
        pytest.approx([-0.05, 1.1]),
        pytest.approx([1.9, 0.0]),
        [0.0, 0.0],
    ]
    # the rows' means are -0.25, 1 and 0
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert controller.value == pytest.approx(0.1)
