"""Norm, rotary embedding and rows: values and gradients against double precision, the torch reference and the GPU form."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from lockstep.kernels import ops
from lockstep.kernels.ops import NormKind
from tests.kernels.gradient_check import check, doubles, leaf

NORMS: dict[NormKind, type[nn.Module]] = {
    "rms": Qwen2RMSNorm,
    "rms_wide": Olmo2RMSNorm,
    "rms_offset": GemmaRMSNorm,
    "layer": CohereLayerNorm,
}


def exact_norm(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * (weight + 1 if kind == "rms_offset" else weight)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", [(1, 300, 96), (5, 896), (1, 6, 3, 64)])
def test_norm(kind: NormKind, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    wide = leaf(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)
    x, weight = wide[..., : shape[-1]], leaf(shape[-1], dtype=dtype, device=device)  # part of a wider product
    module = NORMS[kind](shape[-1], eps=1e-5).to(device, dtype)
    module.weight.data.copy_(weight.detach())
    out = ops.norm(x, weight, 1e-5, kind)
    step = 2.0**-7 if dtype == torch.bfloat16 else 5e-6
    torch.testing.assert_close(out, module(x), rtol=step, atol=step)
    exact_wide, exact_weight = doubles(wide, weight)
    exact = exact_norm(exact_wide[..., : shape[-1]], exact_weight, kind)
    check([out], [exact], [wide, weight], [exact_wide, exact_weight])


@pytest.mark.parametrize("kind", NORMS)
def test_norm_of_the_residual_stream(kind: NormKind, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    stream, weight = leaf(1, 300, 96, dtype=torch.float32, device=device), leaf(96, dtype=dtype, device=device)
    y, w = doubles(stream, weight)
    outs = ops.norm_stream(stream, weight, 1e-5, kind)
    assert [out.dtype for out in outs] == [dtype, torch.float32]
    assert torch.equal(outs[1], stream)
    check(list(outs), [exact_norm(y, w, kind), 1.0 * y], [weight, stream], [w, y])


@pytest.mark.parametrize(("width", "interleaved"), [(24, False), (16, False), (24, True)])
def test_rotary(width: int, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    q, k = (leaf(1, 9, heads, 24, dtype=dtype, device=device) for heads in (5, 2))
    cos, sin = (torch.randn(1, 9, width).to(device, dtype) for _ in range(2))
    outs = ops.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved)
    exact_leaves = doubles(q, k)
    exact = []
    for x in (t.transpose(1, 2) for t in exact_leaves):
        turned = x[..., :width]
        if interleaved:
            pairs = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            pairs = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
        rotated = turned * cos.double()[:, None] + pairs * sin.double()[:, None]
        exact.append(torch.cat((rotated, x[..., width:]), -1))
    check(list(outs), exact, [q, k], exact_leaves)


@pytest.mark.parametrize("shape", [(2, 64), (3, 40), (600,)])
def test_rows_taken_several_times(shape: tuple[int, ...], device: str) -> None:
    """On a GPU the gradient of a row that went to many places is rounded once, not at each addition."""
    half = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    x = leaf(7, *shape, dtype=half, device=device)
    index = torch.tensor([5, 0, 0, 6, 3, *[2] * 40, 0], device=device)
    out = ops.take_rows(x, ops.RowIndex(index, len(x)))
    assert torch.equal(out, x[index])
    grad = torch.randn(out.shape, device=device).to(half)
    out.backward(grad)
    exact = torch.zeros(x.shape, dtype=torch.float64, device=device).index_add(0, index, grad.double())
    torch.testing.assert_close(x.grad, exact.to(half), rtol=1e-5 if half == torch.float32 else 2**-8, atol=1e-5)
