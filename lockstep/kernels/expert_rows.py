"""Operations of a mixture of experts on rows sorted by expert, forward and backward together.

    sort_by_expert   which rows each expert computes
    to_experts       tokens (T, H) -> rows (S, H), S = T * K, expert after expert
    grouped_linear   rows of each expert times its weight: one product
    weighted_gate    activation(gate) * up * weight of the row
    to_tokens        rows (S, H) -> the sum of each token's rows (T, H)

Each has a form in plain torch, which any device runs. `to_experts` and `to_tokens` are each other's transpose: the backward of one
is the forward of the other, without atomics, so results do not change from run to run.

Shapes: T tokens, K experts per token, S = T * K rows, E experts, H width of the stream, I inner width of an expert.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.kernels.linear import Activation
from lockstep.kernels.ops import HALF, on_gpu


class ExpertRows(NamedTuple):
    """Where the rows of each expert are. All on the device: nothing here waits for the host.

    order:  (S,) the pair (token, choice) of each row, as token * K + choice.
    place:  (S,) the row of each pair: the inverse of `order`.
    expert: (S,) of each row, ascending.
    ends:   (E,) int32, behind the last row of each expert.
    top_k:  K.
    """

    order: Tensor
    place: Tensor
    expert: Tensor
    ends: Tensor
    top_k: int

    @property
    def token(self) -> Tensor:
        """(S,) of each row."""
        return self.order // self.top_k


def sort_by_expert(chosen: Tensor, num_experts: int) -> ExpertRows:
    """chosen: (T, K) the experts of each token."""
    expert, order = chosen.flatten().sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(num_experts, device=order.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    return ExpertRows(order, place, expert, ends, chosen.shape[1])


def to_experts(x: Tensor, rows: ExpertRows) -> Tensor:
    """x (T, H) -> (S, H): every token once for each of its experts."""
    out: Tensor = _ToExperts.apply(x, rows)
    return out


def to_tokens(y: Tensor, rows: ExpertRows) -> Tensor:
    """y (S, H) -> (T, H): the sum of each token's rows, in float32."""
    out: Tensor = _ToTokens.apply(y, rows)
    return out


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_of_tokens(grad, ctx.rows), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return _sum_of_tokens(y, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.rows.token), None


def _sum_of_tokens(y: Tensor, rows: ExpertRows) -> Tensor:
    if on_gpu(y):
        from lockstep.kernels.gather import sum_rows

        starts = torch.arange(0, len(y) + 1, rows.top_k, device=y.device)
        return sum_rows(y.contiguous(), rows.place, starts)
    return y.index_select(0, rows.place).unflatten(0, (-1, rows.top_k)).sum(1)


def grouped_linear(x: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
    """x (S, in) -> (S, out): the rows of expert e times weight[e]. weight: (E, in, out), also a transposed view."""
    if _fits_grouped_mm(x, weight):
        return F.grouped_mm(x, weight, offs=rows.ends)
    return grouped_linear_reference(x, weight, rows)


def grouped_linear_reference(x: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
    """A product for each expert; waits for the device."""
    sizes = rows.ends.diff(prepend=rows.ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(x.split(sizes), weight.unbind(0))])


def _fits_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """torch's grouped product needs rows of whole 16 bytes, of both operands and of their gradients, and Ampere or later."""
    if x.dtype not in (torch.float32, *HALF) or (x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)):
        return False
    return all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])


def has_grouped_kernel(weight: Tensor) -> bool:
    """Whether `grouped_linear` with this weight is one kernel on CUDA.

    Elsewhere torch reads `ends` on the host and loops over the experts, which a CUDA graph cannot capture.
    """
    if not weight.is_cuda or weight.dtype != torch.bfloat16 or not _fits_grouped_mm(weight, weight):
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in (9, 10)


def weighted_gate(gate_up: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up * weight of gate_up (S, 2 I), gate first, and weights (S,); in the dtype of gate_up.

    On CUDA the backward computes the gated product again instead of keeping it.
    """
    if on_gpu(gate_up):
        out: Tensor = _WeightedGate.apply(gate_up, weights, activation)
        return out
    gate, up = gate_up.chunk(2, -1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up * weights[:, None]).to(gate_up.dtype)


class _WeightedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, activation: Activation) -> Tensor:
        from lockstep.kernels.gated import gated_product

        ctx.activation = activation
        ctx.save_for_backward(gate_up, weights)
        return (gated_product(gate_up, activation) * weights[:, None]).to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.gated import gated_product_gradient

        gate_up, weights = ctx.saved_tensors
        grad_product = (grad * weights[:, None]).to(gate_up.dtype).contiguous()
        product = torch.empty_like(grad_product)
        grads = gated_product_gradient(gate_up, grad_product, ctx.activation, product)
        return grads, torch.linalg.vecdot(grad.float(), product.float()).to(weights.dtype), None
