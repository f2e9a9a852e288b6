"""A mixer with Gated DeltaNet and its torch form, for the tests of its kernels."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_next import modeling_qwen3_next

from lockstep.models.gated_delta import GatedDelta
from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()


class Mixer:
    """What the core reads of a transformers mixer, with random weights."""

    __module__ = modeling_qwen3_next.__name__  # whose functions the core calls

    def __init__(self, heads: int, value_heads: int, dim: int, value_dim: int, width: int, dtype: torch.dtype) -> None:
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = heads, value_heads, dim, value_dim
        self.key_dim, self.value_dim = heads * dim, value_heads * value_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim
        self.conv_kernel_size, self.activation = width, "silu"
        weight = torch.randn(self.conv_dim, 1, width, device=DEVICE) / 2
        self.conv1d = SimpleNamespace(weight=nn.Parameter(weight.to(dtype)), bias=None)
        self.A_log = nn.Parameter(torch.rand(value_heads, device=DEVICE).to(dtype))
        self.dt_bias = nn.Parameter(torch.randn(value_heads, device=DEVICE).to(dtype))


class TorchForm(GatedDelta):
    """No kernel of a package, at any dtype."""

    def _rule(self, name: str, x: Tensor) -> Any:
        return super()._rule(name, x.float().cpu())
