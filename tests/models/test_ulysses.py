"""Attention shared among ranks equals attention on one, forward and backward; slices of a packed row are the row."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.models.attention import PackedAttention
from lockstep.models.layer_options import LayerOptions
from lockstep.models.packing import forward_rows
from lockstep.models.ulysses import SequenceGroup, UlyssesAttention, check_heads
from tests.engines.train.ranks import Ranks
from tests.tiny import random_batch

CPU = torch.device("cpu")
LENGTHS = [5, 1, 9, 8, 1]
NUM_TOKENS = sum(LENGTHS)
NOBODY = cast(dist.ProcessGroup, None)


def heads(num_heads: int, num_keys: int, value_width: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(num_heads)
    shapes = [(num_heads, 8), (num_keys, 8), (num_keys, value_width)]
    return [torch.randn(1, h, NUM_TOKENS, width, generator=g) for h, width in shapes]


def attend(tensors: list[Tensor], context: Any, weight: Tensor, options: LayerOptions) -> list[Tensor]:
    """The output and the gradients of query, key, value and sinks (0 without sinks)."""
    query, key, value = (t.clone().requires_grad_() for t in tensors)
    sinks = torch.linspace(-1, 1, query.shape[1]).requires_grad_()
    options = replace(options, sinks=sinks if options.sinks is not None else None)
    out = context.attend(nn.Module(), query, key, value, options)
    (out * weight).sum().backward()
    grads = [cast(Tensor, t.grad) for t in (query, key, value)]
    return [out.detach(), *grads, torch.zeros(len(sinks)) if sinks.grad is None else sinks.grad]


def attend_on_a_slice(num_heads: int, num_keys: int, value_width: int, options: LayerOptions) -> list[Any]:
    size, rank = dist.get_world_size(), dist.get_rank()
    share = NUM_TOKENS // size
    here = slice(rank * share, (rank + 1) * share)
    sequence = SequenceGroup(cast(dist.ProcessGroup, dist.group.WORLD), rank, size)
    context = UlyssesAttention(PackedAttention(LENGTHS, CPU), sequence)
    tensors = [t[:, :, here] for t in heads(num_heads, num_keys, value_width)]
    weight = loss_weight(num_heads, value_width)[:, here]
    return [t.numpy() for t in attend(tensors, context, weight, options)]


def loss_weight(num_heads: int, value_width: int) -> Tensor:
    count = NUM_TOKENS * num_heads * value_width
    return torch.linspace(-1, 1, count).sin().view(1, NUM_TOKENS, num_heads, value_width)


@pytest.mark.parametrize(
    ("size", "num_heads", "num_keys"),
    [(2, 4, 4), (2, 4, 2), (2, 6, 3), (2, 4, 1), (4, 4, 2), (4, 12, 6), (4, 8, 1)],
)
def test_attention_on_several_ranks_equals_attention_on_one(
    ranks: Ranks, size: int, num_heads: int, num_keys: int
) -> None:
    """Also if the number of key heads is not divisible by that of ranks, so that they must be copied."""
    some = torch.zeros(0)
    capped = LayerOptions(0.3, softcap=1.0, sinks=some)
    for options, width in [(LayerOptions(0.3), 8), (LayerOptions(0.3, sliding_window=3), 6), (capped, 8)]:
        whole = PackedAttention(LENGTHS, CPU)
        tensors = heads(num_heads, num_keys, width)
        out, *grads, of_sinks = attend(tensors, whole, loss_weight(num_heads, width), options)
        results = ranks.run(size, attend_on_a_slice, num_heads, num_keys, width, options)
        shared = [[torch.from_numpy(r[i]) for r in results] for i in range(5)]
        torch.testing.assert_close(torch.cat(shared[0], 1), out, atol=1e-6, rtol=1e-5)
        for pieces, grad in zip(shared[1:4], grads):
            torch.testing.assert_close(torch.cat(pieces, 2), grad, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(torch.stack(shared[4]).sum(0), of_sinks, atol=1e-6, rtol=1e-5)


def sum_twice() -> tuple[list[float], list[float]]:
    sequence = SequenceGroup(cast(dist.ProcessGroup, dist.group.WORLD), dist.get_rank(), dist.get_world_size())
    values = torch.tensor([1.0 + dist.get_rank(), 2.0], requires_grad=True)
    total = sequence.sum(values)
    (total**2).sum().backward()
    return total.tolist(), cast(Tensor, values.grad).tolist()


def test_a_sum_hands_the_gradient_on_once(ranks: Ranks) -> None:
    """Both ranks compute the same loss, so each gets d loss / d total and not twice that."""
    assert ranks.run(2, sum_twice) == [([3.0, 4.0], [6.0, 8.0])] * 2


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_slices_of_a_packed_row_are_the_row(size: int) -> None:
    batch = random_batch(5)
    whole = forward_rows(batch, CPU, "packed")
    slices = [forward_rows(batch, CPU, "packed", sequence=SequenceGroup(NOBODY, r, size)) for r in range(size)]
    num_tokens = whole.input_ids.shape[1]
    share = -(-num_tokens // size)
    assert [s.input_ids.shape for s in slices] == [(1, share)] * size
    tokens, positions = (torch.cat([getattr(s, n) for s in slices], 1) for n in ("input_ids", "position_ids"))
    assert torch.equal(tokens[:, :num_tokens], whole.input_ids)
    assert torch.equal(positions[:, :num_tokens], whole.position_ids)
    assert not tokens[:, num_tokens:].any()
    for name, offset in [("predicts", True), ("last", True), ("targets", False), ("row", False), ("last_row", False)]:
        joined = torch.cat([getattr(s, name) + offset * share * r for r, s in enumerate(slices)])
        assert torch.equal(joined, getattr(whole, name)), name
    for s in slices:
        assert ((s.predicts >= 0) & (s.predicts < share)).all()
        lengths = cast(PackedAttention, cast(UlyssesAttention, s.context).whole).lengths
        assert lengths == batch["attention_mask"].sum(-1).tolist() + [1] * (share * size - num_tokens)


def test_heads_must_divide() -> None:
    check_heads(12, 4)
    with pytest.raises(
        ValueError, match=r"size=5: the model's 12 attention heads .* set it to one of 1, 2, 3, 4, 6, 12"
    ):
        check_heads(12, 5)
