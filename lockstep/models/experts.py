"""The experts of a layer, as grouped products or, for few rows, as tiles of rows. Training and decoding, CPU and CUDA.

    tokens ─► sorted by expert ─► gate, up (one product) ─► activation(gate) * up * weight ─► down (one product) ─► sum per token

This is an implementation of transformers' `ExpertsInterface`, which every model is loaded with (`EXPERTS_NAME`): it computes with
the parameters of the experts module that transformers calls, in our layers and in those of transformers, so names, checkpoints,
routers and shared experts stay as they are. A block without this interface (DBRX, Llama 4, ...) keeps its own forward.

The weight of a row multiplies the input of `down`, which is linear, not its output: the backward then keeps no row of the stream's
width. Which form computes:

    CUDA without gradients, few rows per expert    tiles of rows (`kernels/expert_decode.py`), which a CUDA graph can capture
    otherwise                                      grouped products: one kernel (CUDA, bfloat16, Hopper or data-centre Blackwell), a
                                                   loop inside of torch (CPU), or a loop that waits for the device (other CUDA)

Shapes as in `kernels/expert_rows.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from lockstep.kernels.expert_rows import (
    grouped_linear,
    has_grouped_kernel,
    sort_by_expert,
    to_experts,
    to_tokens,
    weighted_gate,
)
from lockstep.kernels.ops import on_gpu

EXPERTS_NAME = "lockstep"
"""Our implementation in transformers' `ExpertsInterface`."""

FEW_ROWS = 32
"""Per expert: reading an expert's weights takes longer than multiplying as many rows with them."""
FEW_ROWS_OR_LOOP = 64
"""The same if the grouped product is a loop over the experts, which no CUDA graph can capture."""
MAX_TILED_ROWS = 8192
"""Of all experts: a program that builds a tile holds the experts of all rows in registers."""


def experts_forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over each token's experts (T, H). hidden: (T, H); chosen, weights: (T, K)."""
    if _has_few_rows(experts, chosen):
        return _tiled_forward(experts, hidden, chosen, weights)
    rows = sort_by_expert(chosen, experts.num_experts)
    row_weights = weights.flatten().index_select(0, rows.order)
    x = to_experts(hidden.to(experts.down_proj.dtype), rows)
    x = grouped_linear(x, _first_weight(experts), rows)
    if experts.has_bias:
        # not index_select: its gradient would be summed by atomics in half precision
        x = x + _first_bias(experts)[rows.expert]
    x = grouped_linear(_activated(experts, x, row_weights), _last_weight(experts), rows)
    if experts.has_bias:
        x = x + (experts.down_proj_bias[rows.expert] * row_weights[:, None]).to(x.dtype)
    return to_tokens(x, rows).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)


def experts_implementation(hf_config: PretrainedConfig) -> str | None:
    """What to load the model with; None is transformers' default, which computes quantised experts: they have other parameters."""
    return None if hasattr(hf_config, "quantization_config") else EXPERTS_NAME


def _has_few_rows(experts: Any, chosen: Tensor) -> bool:
    """Whether `_tiled_forward` computes this forward."""
    weight = experts.down_proj
    if torch.is_grad_enabled() or not on_gpu(weight):
        return False
    few = FEW_ROWS if has_grouped_kernel(weight) else FEW_ROWS_OR_LOOP
    return chosen.numel() <= min(few * experts.num_experts, MAX_TILED_ROWS)


def _tiled_forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`experts_forward` without gradients, by tiles of rows that are never sorted."""
    from lockstep.kernels.expert_decode import expert_gate, expert_product, expert_tiles, sum_choices

    tiles = expert_tiles(chosen, experts.num_experts)
    x = hidden.to(experts.down_proj.dtype)
    first_bias, last_bias = (_first_bias(experts), experts.down_proj_bias) if experts.has_bias else (None, None)
    if experts.has_gate and _is_plain_silu(experts):
        x = expert_gate(x, _first_weight(experts), tiles, first_bias, weights)
    else:
        x = _activated(experts, expert_product(x, _first_weight(experts), tiles, first_bias), weights.flatten())
    x = expert_product(x, _last_weight(experts), tiles, last_bias, weights)
    return sum_choices(x, tiles.top_k).to(hidden.dtype)


def _activated(experts: Any, x: Tensor, weights: Tensor) -> Tensor:
    """What `down` multiplies, with each row's weight: (S, 2 I) -> (S, I), or (S, I) without a gate."""
    if experts.has_gate and _is_plain_silu(experts):
        return weighted_gate(x, weights, "silu")
    x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
    return (x * weights[:, None]).to(experts.down_proj.dtype)


def _is_plain_silu(experts: Any) -> bool:
    """Whether the gate is silu(first half) * second half."""
    return type(experts)._apply_gate is _default_apply_gate and isinstance(experts.act_fn, (nn.SiLU, SiLUActivation))


def _first_weight(experts: Any) -> Tensor:
    """(E, H, 2 I), or (E, H, I) without a gate."""
    weight: Tensor = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return weight if experts.is_transposed else weight.transpose(1, 2)


def _last_weight(experts: Any) -> Tensor:
    """(E, I, H)"""
    weight: Tensor = experts.down_proj
    return weight if experts.is_transposed else weight.transpose(1, 2)


def _first_bias(experts: Any) -> Tensor:
    bias: Tensor = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
    return bias
