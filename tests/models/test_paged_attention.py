"""Paged attention against plain attention over the whole sequence."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.attention import AttentionContext, LayerOptions, sliding_mask
from lockstep.models.paged_attention import (
    CachedRows,
    LayerProbe,
    LayerShape,
    PagedAttention,
    PagedCache,
    WindowAttention,
)

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 6, 2, 8, 8
SCALE = 0.3
CPU = torch.device("cpu")


def layer(index: int = 0) -> nn.Module:
    module = nn.Module()
    module.layer_idx = index  # type: ignore[assignment]
    return module


def attend(context: AttentionContext, at: nn.Module, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """(T, heads, dim) -> (T, H, value dim)."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return context.attend(at, q, k, v, LayerOptions(SCALE, window, None))[0]


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    mask = sliding_mask(q.shape[2], window, CPU)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)


def random_sequence(length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (KEY_HEADS, VALUE_DIM))
    q, k, v = (torch.randn(length, *shape, generator=g) for shape in shapes)
    return q, k, v


def slots(table: list[int], start: int, stop: int, size: int) -> list[int]:
    return [table[p // size] * size + p % size for p in range(start, stop)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_a_part_and_single_tokens_in_one_step(window: int | None, size: int) -> None:
    """Three sequences of 7, 9 and 5 tokens: two get one token, one a part of three, after what the cache holds already."""
    cache = PagedCache({2: LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM, torch.float32)}, 40, size, CPU)
    lengths = [7, 9, 5]
    data = [random_sequence(n, seed) for seed, n in enumerate(lengths)]
    expected = [plain(*d, window) for d in data]
    blocks = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[blocks.pop() for _ in range(-(-n // size))] for n in lengths]
    module = layer(2)

    fresh = torch.tensor([s for t, stop in zip(tables, (6, 6, 4)) for s in slots(t, 0, stop, size)])
    context = PagedAttention(cache, fresh, [], fresh_lengths=[6, 6, 4])
    q, k, v = (torch.cat([d[i][:stop] for d, stop in zip(data, (6, 6, 4))]) for i in range(3))
    out = attend(context, module, q, k, v, window)
    torch.testing.assert_close(out, torch.cat([e[:stop] for e, stop in zip(expected, (6, 6, 4))]))

    width = max(len(tables[0]), len(tables[2]))
    rows = [
        CachedRows(
            0, torch.tensor([t + [39] * (width - len(t)) for t in (tables[0], tables[2])]), torch.tensor([[6], [4]])
        ),
        CachedRows(2, torch.tensor([tables[1]]), torch.tensor([[6, 7, 8]])),
    ]
    new = random_sequence(3, seed=9)
    new_table = [blocks.pop() for _ in range(3)]
    parts = [(0, 6, 7), (2, 4, 5), (1, 6, 9)]
    places = [s for i, a, b in parts for s in slots(tables[i], a, b, size)] + slots(new_table, 0, 3, size)
    context = PagedAttention(cache, torch.tensor(places), rows, fresh_lengths=[3])
    q, k, v = (torch.cat([*(data[i][n][a:b] for i, a, b in parts), new[n]]) for n in range(3))
    out = attend(context, module, q, k, v, window)
    torch.testing.assert_close(out, torch.cat([*(expected[i][a:b] for i, a, b in parts), plain(*new, window)]))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("size", [1, 4])
def test_a_window_of_single_tokens_and_what_it_leaves_in_the_cache(window: int | None, size: int) -> None:
    """Rows of 3 and 30 tokens, which are not padded together, get two or four more; the cache then holds them all."""
    cache = PagedCache({2: LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM, torch.float32)}, 60, size, CPU)
    starts, num_steps = [3, 3, 30], 4
    data = [random_sequence(n + num_steps, seed) for seed, n in enumerate(starts)]
    expected = [plain(*d, window) for d in data]
    blocks = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[blocks.pop() for _ in range(-(-(n + num_steps) // size))] for n in starts]
    module = layer(2)
    fresh = torch.tensor([s for t, n in zip(tables, starts) for s in slots(t, 0, n, size)])
    q, k, v = (torch.cat([d[i][:n] for d, n in zip(data, starts)]) for i in range(3))
    attend(PagedAttention(cache, fresh, [], fresh_lengths=starts), module, q, k, v, window)

    steps = torch.arange(num_steps)[:, None]
    positions = torch.tensor(starts) + torch.minimum(steps, torch.tensor([1, 3, 3]))  # the first stops after two steps
    context = WindowAttention(cache, tables, positions)
    for step, places in enumerate(positions.tolist()):
        context.begin()
        q, k, v = (torch.stack([d[i][p] for d, p in zip(data, places)]) for i in range(3))
        out = attend(context, module, q, k, v, window)
        going = slice(1 if step >= 2 else 0, None)
        torch.testing.assert_close(out[going], torch.stack([e[p] for e, p in zip(expected, places)])[going])
    context.write_back()
    for (_, keys, values), table, start, count in zip(data, tables, starts, (2, 4, 4)):
        for store, tokens in ((cache.keys[2], keys), (cache.values[2], values)):
            places = store.view(60, KEY_HEADS, size, -1).transpose(1, 2)[table].flatten(0, 1)
            torch.testing.assert_close(places[: start + count], tokens[: start + count])


def test_blocks_are_copied_and_kept_when_the_cache_grows() -> None:
    shape = LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM, torch.float32)
    cache = PagedCache({0: shape, 1: shape}, 4, 2, CPU)
    for index in (0, 1):
        cache.keys[index].copy_(torch.randn_like(cache.keys[index]))
        cache.values[index].copy_(torch.randn_like(cache.values[index]))
    before = [t.clone().view(4, KEY_HEADS, 2, -1) for t in (cache.keys[1], cache.values[1])]
    cache.copy_blocks([(0, 2), (2, 3)])  # as they were before: the copies of one step do not chain
    cache.grow(7)
    for old, new in zip(before, (cache.keys[1].view(7, KEY_HEADS, 2, -1), cache.values[1].view(7, KEY_HEADS, 2, -1))):
        assert torch.equal(new[:4], old[[0, 1, 0, 2]])
        assert (new[4:] == 0).all()


def test_the_probe_notes_shapes_and_refuses_what_it_cannot_tell_apart() -> None:
    probe = LayerProbe()
    q, k, v = (t.transpose(0, 1)[None] for t in random_sequence(1, 0))
    out = probe.attend(layer(4), q, k, v, LayerOptions(SCALE, 5, None))
    assert out.shape == (1, 1, HEADS, VALUE_DIM)
    assert torch.equal(out[0, 0, 0], v[0, 0, 0]) and torch.equal(out[0, 0, -1], v[0, -1, 0])
    assert probe.layers == {4: LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM, torch.float32, 5)}
    assert probe.layers[4].bytes_per_token == 2 * (8 + 8) * 4
    with pytest.raises(ValueError, match="layer_idx"):
        probe.attend(layer(4), q, k, v, LayerOptions(SCALE, None, None))
    with pytest.raises(ValueError, match="soft-capping"):
        probe.attend(layer(5), q, k, v, LayerOptions(SCALE, None, 30.0))
