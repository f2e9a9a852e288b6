"""Attention over packed sequences on a GPU: the kernel in half precision against the padded rows in double precision."""

import pytest
import torch
from torch import Tensor, nn

from lockstep.models.attention import LayerOptions, PackedAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [9, 5, 30, 70, 33]
PREFIXES = [(0, 0), (0, 6), (0, 6), (0, 0), (44, 60)]
"""The second and third sequence go on from the first one's six tokens, the last from 60 of the fourth's."""


def values_and_gradients(
    tensors: list[Tensor], device: str, grad: Tensor, window: int | None, shared: bool
) -> list[Tensor]:
    leaves = [t.to(device, copy=True).requires_grad_() for t in tensors]
    context = PackedAttention(LENGTHS, torch.device(device), PREFIXES if shared else None)
    out = context.attend(nn.Identity(), *leaves, LayerOptions(0.2, window))
    out.backward(grad.to(device, out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


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
