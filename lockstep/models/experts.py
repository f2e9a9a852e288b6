"""The experts of a layer as grouped products. Training and decoding, CPU and CUDA.

    tokens ─► sorted by expert ─► gate, up (one product) ─► activation(gate) * up * weight ─► down (one product) ─► sum per token

This is an implementation of transformers' `ExpertsInterface`, which every model is loaded with (`EXPERTS_NAME`): it computes with
the parameters of the experts module that transformers calls, in our layers and in those of transformers, so names, checkpoints,
routers and shared experts stay as they are. A block without this interface (DBRX, Llama 4, ...) keeps its own forward.

The weight of a row multiplies the input of `down`, which is linear, not its output: the backward then keeps no row of the stream's
width. Which form computes:

    a grouped kernel (CUDA, bfloat16, Hopper or data-centre Blackwell), or a CPU    grouped products
    other CUDA devices and types, training or many tokens                           grouped products, which torch loops over there
    the same, decoding few tokens                                                   all experts for all tokens, see `_all_experts`

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

EXPERTS_NAME = "lockstep"
"""Our implementation in transformers' `ExpertsInterface`."""

FEW_TOKENS = 256
"""Up to here reading all experts takes longer than multiplying all tokens with them (about 150 on an A100)."""


def experts_forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over each token's experts (T, H). hidden: (T, H); chosen, weights: (T, K)."""
    if _cannot_be_captured(experts.down_proj) and len(hidden) <= FEW_TOKENS:
        return _all_experts(experts, hidden, chosen, weights)
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


def _all_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`experts_forward` by computing every expert for every token.

    Decoding few tokens reads most experts anyway, and this form has no sizes that depend on data: a CUDA graph can capture it.
    """
    weight_ET = hidden.new_zeros(len(hidden), experts.num_experts, dtype=weights.dtype).scatter_(1, chosen, weights).T
    is_chosen_ET = torch.zeros_like(weight_ET, dtype=torch.bool).scatter_(0, chosen.T, True)
    x = hidden.to(experts.down_proj.dtype).expand(experts.num_experts, *hidden.shape)  # (E, T, H)
    x = torch.bmm(x, _first_weight(experts))
    if experts.has_bias:
        x = x + _first_bias(experts)[:, None]
    x = _activated(experts, x.flatten(0, 1), weight_ET.flatten())
    x = x.masked_fill(~is_chosen_ET.flatten()[:, None], 0.0).unflatten(0, weight_ET.shape)  # what overflowed elsewhere
    x = torch.bmm(x, _last_weight(experts)).sum(0)
    if experts.has_bias:
        x = x + weight_ET.T.to(x.dtype) @ experts.down_proj_bias
    return x.to(hidden.dtype)


def _cannot_be_captured(weight: Tensor) -> bool:
    """Whether a forward without gradients is on a CUDA device that has no grouped product for this weight."""
    return weight.is_cuda and not torch.is_grad_enabled() and not has_grouped_kernel(weight)


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
