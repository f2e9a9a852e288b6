"""Loss and gradient of a mini-batch do not depend on how it is split into micro-batches and ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.kl import kl_penalty
from lockstep.algorithms.losses import (
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    agg_loss,
    compute_entropy_loss,
    compute_value_loss,
    count_batch,
    get_policy_loss_fn,
    prepare_policy_loss,
)
from lockstep.algorithms.losses.aggregate import mini_batch_counts
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.algorithm import RolloutCorrectionConfig
from lockstep.config.policy_loss import PolicyLossConfig

Batch = dict[str, Tensor]
LossFn = Callable[[Tensor, Batch, str, dict[str, int]], Tensor]
NUM_ROWS, WIDTH, NUM_WORDS = 11, 7, 5
PREPARED = ("row_weights", "dropped", "penalized")


def actor_config() -> ActorConfig:
    """Bounds that clip some tokens of the batch and not others, for each loss."""
    correction = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs="token_k2,seq_mean_k3", rollout_rs_threshold="2.0,3.0", loss_type="reinforce"
    )
    policy_loss = PolicyLossConfig(
        clip_cov_ratio=0.2, clip_cov_lb=0.05, clip_cov_ub=2.0, kl_cov_ratio=0.2, rollout_correction=correction
    )
    return ActorConfig(
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=1.5,
        policy_loss=policy_loss,
    )


def policy_loss(name: str) -> LossFn:
    def loss(log_prob: Tensor, rows: Batch, mode: str, counts: dict[str, int]) -> Tensor:
        prepared = {key: rows[key] for key in PREPARED if key in rows}
        function: Any = get_policy_loss_fn(name)
        with mini_batch_counts(counts) if counts else nullcontext():
            value, _ = function(
                rows["old"], log_prob, rows["advantages"], rows["mask"], mode, actor_config(), **prepared
            )
        return cast(Tensor, value)

    return loss


def prepared(name: str, batch: Batch, **how: Any) -> Batch:
    """The batch with the columns of the loss's prepare function."""
    rows = {"old_log_probs": batch["old"], "advantages": batch["advantages"], "response_mask": batch["mask"]}
    return batch | (prepare_policy_loss(name, rows, actor_config(), **how) if name in POLICY_LOSSES else {})


def kl_loss(log_prob: Tensor, rows: Batch, mode: str, counts: dict[str, int]) -> Tensor:
    return agg_loss(kl_penalty(log_prob, rows["old"], "low_var_kl"), rows["mask"], mode, **counts)


def value_loss(vpreds: Tensor, rows: Batch, mode: str, counts: dict[str, int]) -> Tensor:
    return compute_value_loss(vpreds, rows["advantages"], rows["old"], rows["mask"], 0.3, mode, **counts)[0]


def entropy_loss(log_prob: Tensor, rows: Batch, mode: str, counts: dict[str, int]) -> Tensor:
    return compute_entropy_loss(log_prob.unsqueeze(-1) * rows["words"], rows["mask"], mode, **counts)


LOSSES: dict[str, LossFn] = {name: policy_loss(name) for name in POLICY_LOSSES}
COUNTED = ("bypass_mode",)
"""Losses that, without counts, divide by the tokens that were not rejected."""
LOSSES |= {"kl": kl_loss, "value": value_loss, "entropy": entropy_loss}


def make_batch(generator: torch.Generator) -> tuple[Tensor, Batch]:
    """A parameter (B, R) and rows of random length: two without tokens, one with a gap in its mask."""
    lengths = torch.randint(1, WIDTH + 1, (NUM_ROWS,), generator=generator)
    lengths[torch.randperm(NUM_ROWS, generator=generator)[:2]] = 0
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(1)).long()
    mask[lengths.argmax(), 1] = 0
    parameter, old, advantages = torch.randn(3, NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    words = torch.randn(NUM_ROWS, WIDTH, NUM_WORDS, generator=generator, dtype=torch.float64)
    return parameter, {"mask": mask, "old": old, "advantages": advantages, "words": words}


def cut_anywhere(generator: torch.Generator) -> list[Tensor]:
    """Row indices, shuffled and split at 4 random positions."""
    order = torch.randperm(NUM_ROWS, generator=generator)
    places = (torch.randperm(NUM_ROWS - 1, generator=generator)[:4] + 1).sort().values
    return list(torch.tensor_split(order, places.tolist()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_micro_batches_sum_to_the_whole(name: str, mode: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, batch = make_batch(generator)
    loss_fn, batch = LOSSES[name], prepared(name, batch)

    whole = start.clone().requires_grad_(True)
    counts = count_batch(batch["mask"])
    want = loss_fn(whole, batch, mode, counts if name in COUNTED else {})
    want.backward()

    cut = start.clone().requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    for rows in cut_anywhere(generator):
        loss = loss_fn(cut[rows], {key: value[rows] for key, value in batch.items()}, mode, counts)
        loss.backward()
        total += loss.detach()

    torch.testing.assert_close(total, want.detach())
    torch.testing.assert_close(cut.grad, whole.grad)
    assert whole.grad is not None and whole.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_averaging_over_ranks_gives_the_whole(name: str, mode: str) -> None:
    generator = torch.Generator().manual_seed(9)
    start, batch = make_batch(generator)
    loss_fn, batch = LOSSES[name], prepared(name, batch)
    want = loss_fn(start, batch, mode, count_batch(batch["mask"]) if name in COUNTED else {})
    ranks = [rows for rows in cut_anywhere(generator) if len(rows)]
    counts = count_batch(batch["mask"], dp_size=len(ranks))
    losses = [loss_fn(start[rows], {k: v[rows] for k, v in batch.items()}, mode, counts) for rows in ranks]
    torch.testing.assert_close(torch.stack(losses).mean(), want)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_wider_padding_changes_nothing(name: str, mode: str) -> None:
    start, batch = make_batch(torch.Generator().manual_seed(4))
    counts = count_batch(batch["mask"])
    pad = (0, 5)
    wide = {key: torch.nn.functional.pad(batch[key], pad) for key in ("mask", "old", "advantages")}
    narrow_loss = LOSSES[name](start, prepared(name, batch), mode, counts)
    wide_loss = LOSSES[name](torch.nn.functional.pad(start, pad), prepared(name, wide), mode, counts)
    torch.testing.assert_close(wide_loss, narrow_loss)


def test_draws_depend_only_on_the_seed() -> None:
    _, batch = make_batch(torch.Generator().manual_seed(5))
    same = [prepared("clip_cov", batch, seed=3)["dropped"] for _ in range(2)]
    other = [prepared("clip_cov", batch, seed=seed)["dropped"] for seed in range(4, 9)]
    assert torch.equal(*same) and same[0].any()
    assert not all(torch.equal(same[0], draw) for draw in other)
