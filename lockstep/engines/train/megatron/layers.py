"""The parts of a megatron layer that are ours: norm, attention on packed rows, gated product, and sum of the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.kernels.ops import norm, on_gpu, rotary
from lockstep.models.attention import AttentionContext
from lockstep.models.layer_options import LayerOptions


@dataclass(frozen=True)
class PackedRows:
    """What the layers know about the packed row; handed down as megatron's `packed_seq_params`.

    context:  what each token may attend to.
    cos, sin: (1, T, D) of each token's position.
    """

    context: AttentionContext
    cos: Tensor
    sin: Tensor
    qkv_format: ClassVar[str] = "sbhd"


class RmsNorm(nn.Module):
    """In the weight's dtype, also of a float32 residual stream."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # sums its gradient over ranks

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps, "rms")


class GatedProduct(nn.Module):
    """silu(gate) * up; the backward keeps (..., 2 I), gate and up, and nothing else."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        if on_gpu(gate_up):
            out: Tensor = _GatedProduct.apply(gate_up)
            return out
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from lockstep.kernels.gated import gated_product

        ctx.save_for_backward(gate_up)
        return gated_product(gate_up.flatten(0, -2), "silu").unflatten(0, gate_up.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        from lockstep.kernels.gated import gated_product_gradient

        (gate_up,) = ctx.saved_tensors
        grad = grad.flatten(0, -2).contiguous()
        grads = gated_product_gradient(gate_up.flatten(0, -2), grad, "silu", torch.empty_like(grad))
        return grads.view(gate_up.shape)


class PackedCoreAttention(nn.Module):
    """Rotary embedding and causal attention inside each row; query (T, 1, H, D), key and value (T, 1, HK, D) -> (T, 1, H * D)."""

    def __init__(self, config: Any, layer_number: int, **unused: object) -> None:
        super().__init__()
        self.layer_idx = layer_number - 1
        self.options = LayerOptions(scaling=config.kv_channels**-0.5)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedRows,
        **unused: object,
    ) -> Tensor:
        rows = packed_seq_params
        if value.requires_grad:
            value = value.contiguous()  # attention keeps it for its backward: a view would keep query and key too
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        q, k = rotary(q, k, rows.cos, rows.sin)
        return rows.context.attend(self, q, k, v, self.options).transpose(0, 1).flatten(2)


def get_stream_add(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """x + stream, in the stream's dtype; megatron's own rounds the stream to the dtype of x."""
    return _stream_add


def _stream_add(x_and_bias: tuple[Tensor, Tensor | None], stream: Tensor, dropout: float) -> Tensor:
    x, bias = x_and_bias
    assert bias is None and not dropout
    return stream + x
