"""Values and gradients against double precision."""

import torch
from torch import Tensor


def leaf(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape).to(device, dtype).requires_grad_()


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def check(outs: list[Tensor], exact: list[Tensor], leaves: list[Tensor], exact_leaves: list[Tensor]) -> None:
    """Values and, back from the same gradient, the leaves' gradients agree up to the dtype's rounding."""
    half = any(t.dtype == torch.bfloat16 for t in leaves)
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    torch.autograd.backward(exact, [g.double() for g in grads])
    for got, true in [*zip(outs, exact), *((a.grad, b.grad) for a, b in zip(leaves, exact_leaves))]:
        assert got is not None and true is not None
        error = float((got.detach().double() - true.detach()).norm() / true.detach().norm())
        assert error < (1.2e-2 if half else 1e-5)
