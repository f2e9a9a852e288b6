"""Attention over packed sequences: padded rows on a CPU against the formula, the kernel in half precision against them."""

import pytest
import torch
from torch import Tensor, nn

from lockstep.models import attention
from lockstep.models.attention import LayerOptions, PackedAttention
from lockstep.models.short_attention import short_attention

LENGTHS = [9, 5, 30, 70, 33]
PREFIXES = [(0, 0), (0, 6), (0, 6), (0, 0), (44, 60)]
"""The second and third sequence go on from the first one's six tokens, the last from 60 of the fourth's."""
PADDED_LENGTHS = [9, 12, 9, 3, 8, 1]
PADDED_PREFIXES = [(0, 0), (0, 0), (0, 3), (9, 9), (0, 3), (9, 9)]
"""Rows of one bucket that go on from prompts of different lengths, some to be filled up beyond their last key."""


def values_and_gradients(
    tensors: list[Tensor],
    device: str,
    grad: Tensor,
    window: int | None,
    shared: bool,
    lengths: list[int] = LENGTHS,
    prefixes: list[tuple[int, int]] = PREFIXES,
) -> list[Tensor]:
    leaves = [t.to(device, copy=True).requires_grad_() for t in tensors]
    context = PackedAttention(lengths, torch.device(device), prefixes if shared else None)
    out = context.attend(nn.Identity(), *leaves, LayerOptions(0.2, window))
    out.backward(grad.to(device, out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("window", [1, 3])
def test_whole_rows_share_the_mask_of_a_window(window: int) -> None:
    torch.manual_seed(0)
    lengths = [4, 5, 5]
    q, k, v = (torch.randn(1, 2, sum(lengths), 8) for _ in range(3))
    context = PackedAttention(lengths, torch.device("cpu"))
    out = context.attend(nn.Identity(), q, k, v, LayerOptions(0.2, window))[0]
    masks = [rows.mask(window, q) for rows in context.buckets]
    assert [None if mask is None else mask.shape[0] for mask in masks] == [1]
    for start, length in zip((0, 4, 9), lengths):
        for place in range(length):
            seen = slice(start + max(0, place + 1 - window), start + place + 1)
            scores = 0.2 * torch.einsum("hd,hkd->hk", q[0, :, start + place], k[0, :, seen])
            expected = torch.einsum("hk,hkd->hd", scores.softmax(-1), v[0, :, seen])
            torch.testing.assert_close(out[start + place], expected)


@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("head_dim", [32, 64])  # the rows are short for the larger one
def test_short_rows_and_longer_ones_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, window: int | None, shared: bool, kv_heads: int, head_dim: int
) -> None:
    torch.manual_seed(0)
    calls: list[int] = []
    monkeypatch.setattr(attention, "short_attention", lambda *args: (calls.append(1), short_attention(*args))[1])
    num_tokens = sum(LENGTHS)
    tensors = [torch.randn(1, heads, num_tokens, head_dim) for heads in (6, kv_heads, kv_heads)]
    grad = torch.randn(1, num_tokens, 6, head_dim)
    got = values_and_gradients(tensors, "cpu", grad, window, shared)
    exact = values_and_gradients([t.double() for t in tensors], "cpu", grad, window, shared)  # never as short rows
    assert len(calls) == (head_dim == 64)
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_padding_of_short_rows_spoils_nothing(window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    num_tokens = sum(PADDED_LENGTHS)
    tensors = [torch.randn(1, heads, num_tokens, 16) for heads in (6, kv_heads, kv_heads)]
    grad = torch.randn(1, num_tokens, 6, 16)
    got = values_and_gradients(tensors, "cpu", grad, window, True, PADDED_LENGTHS, PADDED_PREFIXES)
    for number, result in enumerate(got):
        exact = padded_values_and_gradients([t.double() for t in tensors], grad, window)[number]
        torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=2e-5)


def padded_values_and_gradients(tensors: list[Tensor], grad: Tensor, window: int | None) -> list[Tensor]:
    """By the formula, a token at a time."""
    q, k, v = leaves = [t.clone().requires_grad_() for t in tensors]
    starts = [sum(PADDED_LENGTHS[:i]) for i in range(len(PADDED_LENGTHS))]
    out = []
    for start, length, (prefix, before) in zip(starts, PADDED_LENGTHS, PADDED_PREFIXES):
        seen = [*range(prefix, prefix + before), *range(start, start + length)]
        for place in range(length):
            last = before + place + 1
            keys = seen[max(0, last - (window or last)) : last]
            repeats = q.shape[1] // k.shape[1]
            of_k, of_v = (t[0, :, keys].repeat_interleave(repeats, 0) for t in (k, v))
            scores = 0.2 * torch.einsum("hd,hkd->hk", q[0, :, start + place], of_k)
            out.append(torch.einsum("hk,hkd->hd", scores.softmax(-1), of_v))
    result = torch.stack(out)[None]
    result.backward(grad.double())
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_rows_that_go_on_from_prompts_of_one_length_share_a_mask() -> None:
    context = PackedAttention([6, 3, 4, 5], torch.device("cpu"), [(0, 0), (0, 4), (0, 4), (0, 4)])
    [of_whole, of_continued] = [rows.mask_of_heads(None, num_heads=2, groups=3) for rows in context.buckets]
    assert of_whole.shape == (1, 6 * 3, 6)
    assert of_continued.shape == (1, 5 * 3, 9)
    seen = (of_continued[0] == 0).sum(-1)
    assert seen.tolist() == [5] * 3 + [6] * 3 + [7] * 3 + [8] * 3 + [9] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_the_kernel_equals_padded_rows(window: int | None, shared: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    num_tokens = sum(LENGTHS)
    tensors = [torch.randn(1, heads, num_tokens, 32).bfloat16() for heads in (6, kv_heads, kv_heads)]
    grad = torch.randn(1, num_tokens, 6, 32).bfloat16()
    got = values_and_gradients(tensors, "cuda", grad, window, shared)
    exact = values_and_gradients([t.double() for t in tensors], "cpu", grad, window, shared)
    for a, b in zip(got, exact, strict=True):
        assert float((a.cpu().double() - b).norm() / b.norm()) < 6e-3
