import math
from typing import Any

import pytest
import torch

from lockstep.algorithms.losses import (
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    agg_loss,
    compute_entropy_loss,
    compute_policy_loss,
    compute_value_loss,
    count_batch,
    entropy_from_logits,
    get_policy_loss_fn,
    register_policy_loss,
)
from lockstep.algorithms.losses.aggregate import mini_batch_counts
from lockstep.config.actor_rollout_ref import ActorConfig

LOSS = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


def actor_config(**given: Any) -> ActorConfig:
    return ActorConfig(**{"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **given})


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10.0),
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 2 / 4),
    ],
)
def test_aggregation_by_hand(mode: str, want: float) -> None:
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(want)
    assert agg_loss(LOSS, torch.zeros_like(MASK), mode).item() == 0.0


def test_global_counts_replace_local_ones() -> None:
    counts = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 8, "loss_scale_factor": 5}
    assert agg_loss(LOSS, MASK, "token-mean", **counts).item() == pytest.approx(10 / 40 * 2)
    assert agg_loss(LOSS, MASK, "token-sum", **counts).item() == pytest.approx(20.0)
    assert agg_loss(LOSS, MASK, "seq-mean-token-mean", **counts).item() == pytest.approx(6 / 8 * 2)
    assert agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", **counts).item() == pytest.approx(10 / 8 * 2 / 5)


def test_counts_of_a_batch() -> None:
    want = {"dp_size": 2, "batch_num_tokens": 4, "global_batch_size": 2, "loss_scale_factor": 4}
    assert count_batch(MASK, dp_size=2) == want
    assert count_batch(MASK, loss_scale_factor=7.0)["loss_scale_factor"] == 7.0


def test_missing_counts_and_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="needs batch_num_tokens of the whole mini-batch with dp_size=2"):
        agg_loss(LOSS, MASK, "token-mean", dp_size=2)
    with pytest.raises(ValueError, match="needs global_batch_size of the whole mini-batch with dp_size=2"):
        agg_loss(LOSS, MASK, "seq-mean-token-sum", dp_size=2)
    with pytest.raises(ValueError, match=r"actor\.loss_agg_mode=tokenmean: no such mode\. Did you mean 'token-mean'"):
        agg_loss(LOSS, MASK, "tokenmean")
    assert len(LOSS_AGG_MODES) == 5


@pytest.mark.parametrize(
    ("ratio", "advantage", "want", "gradient_flows"),
    [
        (1.1, 1.0, -1.1, True),
        (1.5, 1.0, -1.3, False),  # clip-higher at 1.3
        (0.5, 1.0, -0.5, True),  # below, but the loss is the larger of the two
        (0.5, -1.0, 0.8, False),  # clipped at 0.8
        (1.5, -1.0, 1.5, True),
        (4.0, -1.0, 3.0, False),  # dual clip
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, want: float, gradient_flows: bool) -> None:
    old = torch.tensor([[-1.0]])
    new = (old + math.log(ratio)).requires_grad_(True)
    loss, clipfrac, ppo_kl, clipfrac_lower = compute_policy_loss(
        old, new, torch.tensor([[advantage]]), torch.ones(1, 1), cliprange_low=0.2, cliprange_high=0.3, clip_ratio_c=3.0
    )
    loss.backward()
    assert loss.item() == pytest.approx(want, rel=1e-5)
    assert new.grad is not None and bool(new.grad.abs().item() > 1e-6) == gradient_flows
    assert clipfrac.item() == ((ratio, advantage) in [(1.5, 1.0), (0.5, -1.0)])
    assert clipfrac_lower.item() == (ratio == 4.0)
    assert ppo_kl.item() == pytest.approx(-math.log(ratio), rel=1e-5)


def test_rollout_weights_scale_each_token() -> None:
    old = torch.zeros(1, 2)
    weights = torch.tensor([[0.5, 2.0]])
    advantages = torch.tensor([[1.0, 3.0]])
    loss, *_ = compute_policy_loss(old, old, advantages, torch.ones(1, 2), rollout_is_weights=weights)
    assert loss.item() == pytest.approx(-(0.5 + 6.0) / 2)


def test_large_ratios_do_not_overflow() -> None:
    new = torch.tensor([[300.0, -300.0]], requires_grad=True)
    loss, *_ = compute_policy_loss(torch.zeros(1, 2), new, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2))
    loss.backward()
    assert loss.isfinite() and new.grad is not None and new.grad.isfinite().all()


def test_vanilla_reads_the_config() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new, advantages = (torch.randn(3, 4, generator=generator) for _ in range(3))
    config = actor_config(clip_ratio_high=0.4, clip_ratio_c=2.0, loss_scale_factor=11.0)
    counts = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 8}
    with mini_batch_counts(counts):
        loss, metrics = get_policy_loss_fn("vanilla")(
            old_log_prob=old,
            log_prob=new,
            advantages=advantages,
            response_mask=MASK,
            loss_agg_mode="seq-mean-token-sum-norm",
            config=config,
        )
    want, clipfrac, ppo_kl, lower = compute_policy_loss(
        old,
        new,
        advantages,
        MASK,
        cliprange_low=0.2,
        cliprange_high=0.4,
        clip_ratio_c=2.0,
        loss_agg_mode="seq-mean-token-sum-norm",
        dp_size=2,
        global_batch_size=8,
        loss_scale_factor=11.0,
    )
    assert torch.equal(loss, want)
    assert metrics == {"actor/pg_clipfrac": clipfrac, "actor/ppo_kl": ppo_kl, "actor/pg_clipfrac_lower": lower}
    with mini_batch_counts(counts | {"loss_scale_factor": 22.0}):
        half, _ = get_policy_loss_fn("vanilla")(old, new, advantages, MASK, "seq-mean-token-sum-norm", config)
    assert half.item() == pytest.approx(loss.item() / 2)


def test_dual_clip_must_exceed_1() -> None:
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.actor\.clip_ratio_c=0\.9"):
        get_policy_loss_fn("vanilla")(LOSS, LOSS, LOSS, MASK, "token-mean", actor_config(clip_ratio_c=0.9))


def test_policy_loss_registry() -> None:
    assert "vanilla" in POLICY_LOSSES
    with pytest.raises(
        ValueError, match=r"policy_loss\.loss_mode=vanila: no such policy loss\. Did you mean 'vanilla'"
    ):
        get_policy_loss_fn("vanila")
    with pytest.raises(ValueError, match="'vanilla' is already registered"):
        register_policy_loss("vanilla")(lambda *args, **kwargs: (torch.zeros(()), {}))


def test_value_loss_by_hand() -> None:
    vpreds = torch.tensor([[1.0, 0.1, 5.0]], requires_grad=True)
    values, returns = torch.zeros(1, 3), torch.tensor([[2.0, 0.0, 0.0]])
    loss, clipfrac = compute_value_loss(vpreds, returns, values, torch.tensor([[1, 1, 0]]), cliprange_value=0.5)
    # first token: (0.5 - 2)^2 wins over (1 - 2)^2; second: not clipped
    assert loss.item() == pytest.approx(0.5 * (2.25 + 0.01) / 2)
    assert clipfrac.item() == 0.5
    loss.backward()
    assert vpreds.grad is not None and vpreds.grad.tolist() == [pytest.approx([0.0, 0.05, 0.0])]


def test_entropy_equals_that_of_the_distribution() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)) * 3
    want = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy_from_logits(logits), want)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    torch.testing.assert_close(compute_entropy_loss(logits, mask), want[mask.bool()].mean())
    assert entropy_from_logits(torch.zeros(5)).item() == pytest.approx(math.log(5))


def test_entropy_is_exact_for_large_logits() -> None:
    """The textbook logsumexp(z) - sum p z is off by 1e-3 and more here, in float32 over a real vocabulary."""
    logits = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0)) * 4 + 1000.0
    want = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(entropy_from_logits(logits).double(), want, atol=1e-4, rtol=0)
