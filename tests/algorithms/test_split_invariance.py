"""Loss and gradient of a mini-batch do not change with the way it is cut into micro-batches and spread over ranks."""

from collections.abc import Callable

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
)
from lockstep.config.actor_rollout_ref import ActorConfig

Batch = dict[str, Tensor]
LossFn = Callable[[Tensor, Batch, str, dict[str, int]], Tensor]
NUM_ROWS, WIDTH, NUM_WORDS = 11, 7, 5


def policy_loss(name: str) -> LossFn:
    def loss(log_prob: Tensor, rows: Batch, mode: str, counts: dict[str, int]) -> Tensor:
        config = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5, global_batch_info=counts)
        return get_policy_loss_fn(name)(rows["old"], log_prob, rows["advantages"], rows["mask"], mode, config)[0]

    return loss


def kl_loss(log_prob: Tensor, rows: Batch, mode: str, counts: dict[str, int]) -> Tensor:
    return agg_loss(kl_penalty(log_prob, rows["old"], "low_var_kl"), rows["mask"], mode, **counts)


def value_loss(vpreds: Tensor, rows: Batch, mode: str, counts: dict[str, int]) -> Tensor:
    return compute_value_loss(vpreds, rows["advantages"], rows["old"], rows["mask"], 0.3, mode, **counts)[0]


def entropy_loss(log_prob: Tensor, rows: Batch, mode: str, counts: dict[str, int]) -> Tensor:
    return compute_entropy_loss(log_prob.unsqueeze(-1) * rows["words"], rows["mask"], mode, **counts)


LOSSES: dict[str, LossFn] = {name: policy_loss(name) for name in POLICY_LOSSES}
LOSSES |= {"kl": kl_loss, "value": value_loss, "entropy": entropy_loss}


def make_batch(generator: torch.Generator) -> tuple[Tensor, Batch]:
    """A parameter (B, R) and rows of random length, two of them without any token, one with a hole in its mask."""
    lengths = torch.randint(1, WIDTH + 1, (NUM_ROWS,), generator=generator)
    lengths[torch.randperm(NUM_ROWS, generator=generator)[:2]] = 0
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(1)).long()
    mask[lengths.argmax(), 1] = 0
    parameter, old, advantages = torch.randn(3, NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    words = torch.randn(NUM_ROWS, WIDTH, NUM_WORDS, generator=generator, dtype=torch.float64)
    return parameter, {"mask": mask, "old": old, "advantages": advantages, "words": words}


def cut_anywhere(generator: torch.Generator) -> list[Tensor]:
    """Row numbers, shuffled and cut at 4 random places; a piece may be of one row."""
    order = torch.randperm(NUM_ROWS, generator=generator)
    places = (torch.randperm(NUM_ROWS - 1, generator=generator)[:4] + 1).sort().values
    return list(torch.tensor_split(order, places.tolist()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_micro_batches_sum_to_the_whole(name: str, mode: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, batch = make_batch(generator)
    loss_fn = LOSSES[name]

    whole = start.clone().requires_grad_(True)
    want = loss_fn(whole, batch, mode, {})
    want.backward()

    cut = start.clone().requires_grad_(True)
    counts = count_batch(batch["mask"])
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
    loss_fn = LOSSES[name]
    want = loss_fn(start, batch, mode, {})
    ranks = [rows for rows in cut_anywhere(generator) if len(rows)]
    counts = count_batch(batch["mask"], dp_size=len(ranks))
    losses = [loss_fn(start[rows], {k: v[rows] for k, v in batch.items()}, mode, counts) for rows in ranks]
    torch.testing.assert_close(torch.stack(losses).mean(), want)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_wider_padding_changes_nothing(mode: str) -> None:
    start, batch = make_batch(torch.Generator().manual_seed(4))
    counts = count_batch(batch["mask"])
    pad = (0, 5)
    wide = {key: torch.nn.functional.pad(batch[key], pad) for key in ("mask", "old", "advantages")}
    narrow_loss = LOSSES["vanilla"](start, batch, mode, counts)
    wide_loss = LOSSES["vanilla"](torch.nn.functional.pad(start, pad), wide, mode, counts)
    torch.testing.assert_close(wide_loss, narrow_loss)
