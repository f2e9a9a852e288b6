"""Each policy loss on a few tokens, against its formula."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.losses import POLICY_LOSSES, get_policy_loss_fn, prepare_policy_loss, register_policy_loss
from lockstep.algorithms.losses.aggregate import mini_batch_counts
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.algorithm import RolloutCorrectionConfig
from lockstep.config.policy_loss import PolicyLossConfig

OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.2, -3.0]])
NEW = OLD + torch.tensor([[0.3, -0.5, 0.05], [-0.1, 0.6, 9.0]])
ADVANTAGES = torch.tensor([[1.0, -2.0, 0.5], [-1.0, 2.0, 7.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
TOKENS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def config(**given: Any) -> ActorConfig:
    policy_loss = PolicyLossConfig(**given.pop("policy_loss", {"rollout_correction": RolloutCorrectionConfig()}))
    return ActorConfig(**{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | given, policy_loss=policy_loss)


def run(name: str, settings: ActorConfig, **given: Any) -> tuple[float, dict[tuple[int, int], float], dict[str, Any]]:
    """Token-mean loss, gradient of each response token times the number of tokens, and metrics."""
    new = NEW.clone().requires_grad_(True)
    function: Any = get_policy_loss_fn(name)
    loss, metrics = function(OLD, new, ADVANTAGES, MASK, "token-mean", settings, **given)
    loss.backward()
    assert new.grad is not None and new.grad[1, 2] == 0
    return loss.item(), {t: new.grad[t].item() * 5 for t in TOKENS}, metrics


def ratio(token: tuple[int, int]) -> float:
    return math.exp(NEW[token] - OLD[token])


def advantage(token: tuple[int, int]) -> float:
    return ADVANTAGES[token].item()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_gpg_is_the_policy_gradient() -> None:
    loss, gradient, metrics = run("gpg", config())
    assert loss == pytest.approx(mean([-advantage(t) * NEW[t].item() for t in TOKENS]))
    assert gradient == pytest.approx({t: -advantage(t) for t in TOKENS})
    assert metrics == {}


def test_cispo_keeps_a_gradient_beyond_the_clip() -> None:
    loss, gradient, metrics = run("cispo", config())
    held = {t: min(max(ratio(t), 0.8), 1.28) for t in TOKENS}
    assert loss == pytest.approx(mean([-advantage(t) * held[t] * NEW[t].item() for t in TOKENS]))
    assert gradient == pytest.approx({t: -advantage(t) * held[t] for t in TOKENS})
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(3 / 5)


def test_dro_by_hand() -> None:
    loss, gradient, _ = run("dro", config(policy_loss={"dro_beta": 0.5}))
    logs = {t: math.log(ratio(t)) for t in TOKENS}
    assert loss == pytest.approx(mean([-advantage(t) * NEW[t].item() + 0.25 * logs[t] ** 2 for t in TOKENS]))
    assert gradient == pytest.approx({t: -advantage(t) + 0.5 * logs[t] for t in TOKENS}, rel=1e-4)


def test_sapo_gates_each_token() -> None:
    loss, _, _ = run("sapo", config(tau_pos=1.0, tau_neg=2.0))

    def gate(token: tuple[int, int]) -> float:
        tau = 1.0 if advantage(token) > 0 else 2.0
        return 4 / tau / (1 + math.exp(-tau * (ratio(token) - 1)))

    rows = [[-advantage(t) * gate(t) for t in TOKENS if t[0] == row] for row in (0, 1)]
    assert loss == pytest.approx(mean([mean(row) for row in rows]))
    on_policy = OLD.clone().requires_grad_(True)
    value, _ = get_policy_loss_fn("sapo")(OLD, on_policy, ADVANTAGES, MASK, "token-mean", config())
    value.backward()
    assert on_policy.grad is not None  # at ratio 1 the gradient is that of the policy gradient
    assert on_policy.grad[0].tolist() == pytest.approx([-1 / 6, 2 / 6, -0.5 / 6])


def test_gspo_clips_whole_sequences() -> None:
    loss, gradient, metrics = run("gspo", config(clip_ratio_low=0.03, clip_ratio_high=0.04))
    sequence = [math.exp(mean([math.log(ratio(t)) for t in TOKENS if t[0] == row])) for row in (0, 1)]
    assert sequence == pytest.approx([math.exp(-0.05), math.exp(0.25)])

    def token_loss(token: tuple[int, int]) -> float:
        s, a = sequence[token[0]], advantage(token)
        return max(-a * s, -a * min(max(s, 0.97), 1.04))

    assert loss == pytest.approx(mean([token_loss(t) for t in TOKENS]))
    # below the range positive advantages keep their gradient, above it the negative ones do
    assert gradient == pytest.approx(
        {t: -advantage(t) * sequence[t[0]] if (t[0] == 0) == (advantage(t) > 0) else 0.0 for t in TOKENS}
    )
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 5)


def test_geo_mean_by_hand() -> None:
    loss, _, _ = run("geo_mean", config())

    def chosen(token: tuple[int, int]) -> float:
        log, a = math.log(ratio(token)), advantage(token)
        held = min(max(log, -0.2), 0.28)
        return min(log, held) if a > 0 else max(log, held)

    rows = []
    for row in (0, 1):
        own = [t for t in TOKENS if t[0] == row]
        rows.append(-mean([advantage(t) for t in own]) * math.exp(mean([chosen(t) for t in own])))
    assert loss == pytest.approx(mean(rows), rel=1e-5)
    shares = {"row_weights": torch.tensor([0.1, 0.1])}  # two rows of a mini-batch of ten
    assert run("geo_mean", config(), **shares)[0] == pytest.approx(sum(rows) / 10, rel=1e-5)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_drops_tokens_whose_probability_moved_too_far(name: str) -> None:
    bounds = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1} if name == "dppo_tv" else {}
    bounds = bounds or {"clip_ratio_low": 0.005, "clip_ratio_high": 0.02}
    loss, gradient, metrics = run(name, config(**bounds, clip_ratio_c=1.5))

    def inside(token: tuple[int, int]) -> bool:
        old, new = math.exp(OLD[token]), math.exp(NEW[token])
        away = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
        if name == "dppo_tv":
            away = abs(new - old)
        if advantage(token) > 0:
            return new <= old or away <= bounds["clip_ratio_high"]
        return new >= old or away <= bounds["clip_ratio_low"]

    kept = [t for t in TOKENS if inside(t)]
    assert 0 < len(kept) < 5
    assert loss == pytest.approx(sum(-advantage(t) * min(ratio(t), 1.5) * NEW[t].item() for t in kept) / 5)
    assert gradient == pytest.approx({t: -advantage(t) * min(ratio(t), 1.5) if t in kept else 0.0 for t in TOKENS})
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(1 - len(kept) / 5)


def covariance(log_probs: Tensor) -> dict[tuple[int, int], float]:
    logs = {t: log_probs[t].item() for t in TOKENS}
    centre, level = mean(list(logs.values())), mean([advantage(t) for t in TOKENS])
    return {t: (advantage(t) - level) * (logs[t] - centre) for t in TOKENS}


def test_kl_cov_penalizes_the_largest_covariances() -> None:
    settings = config(policy_loss={"kl_cov_ratio": 0.4, "ppo_kl_coef": 0.3})
    largest = sorted(TOKENS, key=lambda t: -covariance(NEW)[t])[:2]
    loss, _, _ = run("kl_cov", settings)
    plain = {t: -advantage(t) * ratio(t) for t in TOKENS}
    paid = [plain[t] + 0.3 * abs(math.log(ratio(t))) * (t in largest) for t in TOKENS]
    assert loss == pytest.approx(mean(paid))
    rows = {"old_log_probs": OLD, "advantages": ADVANTAGES, "response_mask": MASK}
    chosen = prepare_policy_loss("kl_cov", rows, settings)["penalized"]
    assert [t for t in TOKENS if chosen[t]] == sorted(sorted(TOKENS, key=lambda t: -covariance(OLD)[t])[:2])
    assert not chosen[1, 2]


def test_clip_cov_drops_tokens_between_the_bounds() -> None:
    between = [t for t, value in covariance(OLD).items() if 0.1 < value < 2.0]
    assert len(between) == 2
    settings = config(policy_loss={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0})
    rows = {"old_log_probs": OLD, "advantages": ADVANTAGES, "response_mask": MASK}
    prepared = prepare_policy_loss("clip_cov", rows, settings)
    assert [t for t in TOKENS if prepared["dropped"][t]] == between
    loss, gradient, metrics = run("clip_cov", settings, **prepared)
    left = [t for t in TOKENS if t not in between]
    clipped = {t: max(-advantage(t) * ratio(t), -advantage(t) * min(max(ratio(t), 0.8), 1.28)) for t in left}
    assert loss == pytest.approx(sum(clipped.values()) / 5)
    assert all(gradient[t] == 0 for t in between)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 5)
    few = dataclasses.replace(settings.policy_loss, clip_cov_ratio=0.01)
    one = prepare_policy_loss("clip_cov", rows, dataclasses.replace(settings, policy_loss=few))["dropped"]
    assert one.sum() == 1 and any(one[t] for t in between)


def bypass(**correction: Any) -> ActorConfig:
    return config(policy_loss={"rollout_correction": RolloutCorrectionConfig(bypass_mode=True, **correction)})


def test_bypass_clips_against_the_rollout() -> None:
    loss, _, metrics = run("bypass_mode", bypass())
    vanilla, _, _ = run("vanilla", config())
    assert loss == pytest.approx(vanilla)
    assert metrics["rollout_corr/kl"].item() == pytest.approx(mean([-math.log(ratio(t)) for t in TOKENS]))


def test_bypass_reinforce_weighs_and_rejects() -> None:
    settings = bypass(loss_type="reinforce", rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.15)
    loss, gradient, _ = run("bypass_mode", settings)
    kept = [t for t in TOKENS if math.log(ratio(t)) ** 2 / 2 <= 0.15]
    assert kept == TOKENS[:4]
    assert loss == pytest.approx(mean([-advantage(t) * min(ratio(t), 2.0) * NEW[t].item() for t in kept]))
    assert gradient[1, 1] == 0.0
    with mini_batch_counts({"dp_size": 1, "batch_num_tokens": 50}):
        assert run("bypass_mode", settings)[0] == pytest.approx(loss * 4 / 50)


def test_bypass_refuses_batch_normalization() -> None:
    settings = bypass(loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True)
    run("bypass_mode", settings)
    refused = pytest.raises(ValueError, match=r"algorithm\.rollout_correction\.rollout_is_batch_normalize=true")
    with mini_batch_counts({"dp_size": 1, "batch_num_tokens": 50}), refused:
        run("bypass_mode", settings)


def test_bypass_without_tokens_is_0() -> None:
    new = NEW.clone().requires_grad_(True)
    loss, _ = get_policy_loss_fn("bypass_mode")(OLD, new, ADVANTAGES, MASK * 0, "token-mean", bypass())
    loss.backward()
    assert loss == 0 and new.grad is not None and new.grad.abs().sum() == 0


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_masked_positions_are_ignored(name: str) -> None:
    """Padding with NaN log-probs changes neither the loss nor the gradient of any other token."""
    settings = bypass(rollout_is="sequence", rollout_rs="seq_max_k3", rollout_rs_threshold=3.0)
    settings = dataclasses.replace(
        settings, policy_loss=dataclasses.replace(settings.policy_loss, clip_cov_lb=50.0, clip_cov_ub=60.0)
    )
    results = []
    for filling in (0.0, float("nan")):
        old, new, advantages = (torch.where(MASK.bool(), x, filling) for x in (OLD, NEW, ADVANTAGES))
        new.requires_grad_(True)
        loss, _ = get_policy_loss_fn(name)(old, new, advantages, MASK, "token-mean", settings)
        loss.backward()
        assert new.grad is not None
        results.append((loss.detach(), torch.where(MASK.bool(), new.grad, 0.0)))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_own_loss_with_a_prepare_function() -> None:
    def share(mini_batch: Any, settings: ActorConfig) -> dict[str, Tensor]:
        return {"level": mini_batch.rows["advantages"].sum(-1).mean().expand(len(mini_batch.rows["advantages"]))}

    def loss(*args: Any, level: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros(()), {}

    register_policy_loss("of_my_own", prepare=share)(loss)
    rows = {"advantages": ADVANTAGES}
    assert prepare_policy_loss("of_my_own", rows, config())["level"].tolist() == [3.75, 3.75]
    assert prepare_policy_loss("vanilla", rows, config()) == {}
