"""Norms as transformers rounds them; gates and rotary embedding as its functions in float32, rounded once."""

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels.gated import Activation, gated_product  # noqa: E402
from lockstep.kernels.head import linear_float32  # noqa: E402
from lockstep.kernels.norms import rms_norm  # noqa: E402
from lockstep.kernels.rotary import rotary  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rare differences of the last bit."""
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 5e-6
    torch.testing.assert_close(got, expected, rtol=step, atol=step)
    if got.dtype == torch.bfloat16:
        assert (got != expected).float().mean() < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cls", "offset"), [(Qwen2RMSNorm, False), (GemmaRMSNorm, True)])
@pytest.mark.parametrize("shape", [(1, 7, 896), (5, 96), (1, 6, 3, 64)])
def test_rms_norm(dtype: torch.dtype, cls: type, offset: bool, shape: tuple[int, ...]) -> None:
    module = cls(shape[-1], eps=1e-5).to(DEVICE, dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(*shape[:-1], 2 * shape[-1], device=DEVICE).to(dtype)[..., : shape[-1]]  # a part of something wider
    close(rms_norm(x, module.weight, 1e-5, offset=offset), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_product_of_halves(dtype: torch.dtype, activation: Activation) -> None:
    gate, up = (torch.randn(1, 5, 2 * 100, device=DEVICE) * 3).to(dtype).chunk(2, -1)
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    wide = gate.float()
    expected = (silu(wide) if activation == "silu" else gelu(wide, approximate="tanh")) * up.float()
    close(gated_product(gate, up, activation), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 24])
def test_rotary(dtype: torch.dtype, dim: int) -> None:
    wide = torch.randn(1, 9, 8, dim, device=DEVICE).to(dtype).transpose(1, 2)
    q, k = wide[:, :5], wide[:, 5:7]
    cos, sin = (torch.randn(1, 9, dim, device=DEVICE).to(dtype) for _ in range(2))
    expected = apply_rotary_pos_emb(*(tensor.float() for tensor in (q, k, cos, sin)))
    for got, exact in zip(rotary(q, k, cos, sin), expected):
        close(got, exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_float32_and_its_gradients(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 32, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(20, 32, device=DEVICE).to(dtype).requires_grad_()
    out = linear_float32(x, weight)
    exact = x.detach().double() @ weight.detach().double().T
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    out.backward(grad)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    expected = grad.double() @ weight.detach().double()
    torch.testing.assert_close(x.grad.double(), expected, rtol=tolerance, atol=tolerance)  # type: ignore[union-attr]
    expected = grad.double().flatten(0, 1).T @ x.detach().double().flatten(0, 1)
    torch.testing.assert_close(weight.grad.double(), expected, rtol=tolerance, atol=tolerance)  # type: ignore[union-attr]
