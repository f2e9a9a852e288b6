"""Exact mode: the result of a row does not depend on the other rows, whatever batch it is computed in.

A matrix product chooses its kernel, and so the order in which it sums, by the number of rows; attention by the number of queries
and keys. Here the same kernel computes every row: on the CPU products are computed `TILE` rows at a time, the last tile padded; on
CUDA by `kernels/exact_product.py`. On the CPU silu and gelu have other code for entries that do not fill a vector register, so
they are composed of operations that have not. Norms, rotary embedding and softmax are computed row by row anyway.

Only the forward is exact. Gradients are the usual ones.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 32
"""Rows of one product on the CPU."""
NUM_TRIED = 200
"""Rows with which products are tried."""

_is_on: ContextVar[bool] = ContextVar("exact", default=False)


def is_exact() -> bool:
    return _is_on.get()


class exact_mode:
    """Turns exact products and attention on or off inside."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self._before: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._before.append(_is_on.set(self.on))

    def __exit__(self, *_: object) -> None:
        _is_on.reset(self._before.pop())


def same_mode_again() -> tuple[AbstractContextManager[None], exact_mode]:
    """`context_fn` of torch.utils.checkpoint: what is computed again in the backward is computed in the mode of the forward."""
    return nullcontext(), exact_mode(is_exact())


def exact_product(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype | None = None,
    *,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """x (T, I) @ weight (O, I).T + bias (O), without gradients. On CUDA the sum is rounded once, to the result's dtype.

    dtype:  of the result, if not of x.
    add_to: (T, O) of that dtype, to which `scale` times the result is added in place.
    """
    if x.is_cuda:
        from lockstep.kernels.exact_product import product

        return product(x, weight, dtype or x.dtype, bias=bias, add_to=add_to, scale=scale)
    out = _product_of_tiles(x, weight).to(dtype or x.dtype)
    if bias is not None:
        out = out + bias
    return out if add_to is None else add_to.add_(out * scale)


def _product_of_tiles(x: Tensor, weight: Tensor) -> Tensor:
    num_rows = len(x)
    padded = F.pad(x, (0, 0, 0, -num_rows % TILE)).contiguous()
    out = padded.new_empty(len(padded), len(weight))
    transposed = weight.t()
    for rows, target in zip(padded.split(TILE), out.split(TILE)):
        torch.mm(rows, transposed, out=target)
    return out[:num_rows]


def exact_activation(x: Tensor, name: str) -> Tensor:
    """silu, or gelu by its tanh approximation (gelu_tanh), on the CPU: the same bits wherever an entry is."""
    out: Tensor = _ExactActivation.apply(x, name)
    return out


class _ExactActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if name == "silu":
            out = wide / torch.exp(-wide).add_(1)
        else:
            cubic = (wide * wide).mul_(wide).mul_(0.044715).add_(wide)
            out = torch.tanh(cubic.mul_(0.7978845608028654)).add_(1).mul_(wide).mul_(0.5)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if ctx.name == "silu":
            return torch.ops.aten.silu_backward(grad, x), None
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), None


@torch.no_grad()
def depends_on_place(name: str, dtype: torch.dtype) -> bool:
    """Whether the activation of an entry depends on where it is in a tensor."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(400, 307, generator=generator)).to(dtype)  # enough for several threads
    parts = [exact_activation(part, name) for row in x[::20] for part in row.split(23)]
    return not torch.equal(torch.cat(parts), exact_activation(x, name)[::20].flatten())


@torch.no_grad()
def depends_on_other_rows(weights: Iterable[Tensor]) -> tuple[int, ...] | None:
    """The shape of a weight whose product gives a row another result at another place or with other rows; None if there is none.
    On CUDA also if tiles of another size do.

    Libraries do not promise it, so it is tried once for each shape.
    """
    shapes = {(tuple(weight.shape), weight.dtype, weight.device): weight for weight in weights}
    for (shape, dtype, device), weight in shapes.items():
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(NUM_TRIED, shape[1], generator=generator).to(device, dtype)
        order = torch.randperm(len(rows), generator=generator).to(device)
        expected = exact_product(rows, weight, torch.float32)
        moved = exact_product(rows[order], weight, torch.float32)
        few = exact_product(rows[5:10], weight, torch.float32)
        if not (torch.equal(moved, expected[order]) and torch.equal(few, expected[5:10])):
            return shape
        if device.type == "cuda" and not _tiles_agree(rows, weight, expected):
            return shape
    return None


def _tiles_agree(rows: Tensor, weight: Tensor, expected: Tensor) -> bool:
    from lockstep.kernels.exact_product import by_all_tiles

    return all(torch.equal(found, expected) for found in by_all_tiles(rows, weight))
