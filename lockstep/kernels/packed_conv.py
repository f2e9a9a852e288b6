"""silu of a depthwise causal convolution over packed sequences, each after its own inputs: Triton kernels, forward and backward.

    y[t] = silu(z[t]),  z[t] = Σ_s weight[:, K - 1 - s] · input[t - s]        s < K; an input before its row is from the row's state

Tokens are described by their age (how many of their row are before them) and their row. State: (N, C, K), the last K inputs before
each row; zeros without one. Only the inputs are kept for the backward pass, which computes z again.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TOKENS = 64
CHANNELS = 64
"""Tokens and channels per program."""


@triton.jit
def _inputs_before(
    x_ptr, state_ptr, token, age, row, channel, inside, x_stride, channels, SHIFT: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The inputs SHIFT tokens before (TOKENS, CHANNELS)."""
    own = inside & (age >= SHIFT)[:, None]
    inputs = tl.load(x_ptr + (token - SHIFT)[:, None] * x_stride + channel[None, :], mask=own, other=0.0).to(tl.float32)
    if state_ptr is not None:
        at = (row[:, None] * channels + channel[None, :]) * K + (K + age - SHIFT)[:, None]
        inputs += tl.load(state_ptr + at, mask=inside & (age < SHIFT)[:, None], other=0.0).to(tl.float32)
    return inputs


@triton.jit
def _sum(
    x_ptr, weight_ptr, state_ptr, token, age, row, channel, inside, x_stride, channels,
    K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """z: the weighted inputs of each token (TOKENS, CHANNELS)."""
    z = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for s in tl.static_range(K):
        weight = tl.load(weight_ptr + channel * K + (K - 1 - s), mask=channel < channels, other=0.0).to(tl.float32)
        inputs = _inputs_before(x_ptr, state_ptr, token, age, row, channel, inside, x_stride, channels, s, K)
        z += weight[None, :] * inputs
    return z


@triton.jit
def _forward(
    x_ptr, weight_ptr, state_ptr, age_ptr, row_ptr, y_ptr, num_tokens, x_stride, channels,
    K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (token < num_tokens)[:, None] & (channel < channels)[None, :]
    age = tl.load(age_ptr + token, mask=token < num_tokens, other=0)
    row = tl.load(row_ptr + token, mask=token < num_tokens, other=0).to(tl.int64)
    z = _sum(x_ptr, weight_ptr, state_ptr, token, age, row, channel, inside, x_stride, channels, K, TOKENS, CHANNELS)
    y = z / (1.0 + tl.exp(-z))
    tl.store(y_ptr + token[:, None] * channels + channel[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_of_sum(
    x_ptr, weight_ptr, state_ptr, age_ptr, row_ptr, grad_ptr, grad_z_ptr, grad_weight_ptr, num_tokens, x_stride, channels,
    K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dz, and these tokens' part of the weight's gradient (blocks of tokens, K, C)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (token < num_tokens)[:, None] & (channel < channels)[None, :]
    age = tl.load(age_ptr + token, mask=token < num_tokens, other=0)
    row = tl.load(row_ptr + token, mask=token < num_tokens, other=0).to(tl.int64)
    z = _sum(x_ptr, weight_ptr, state_ptr, token, age, row, channel, inside, x_stride, channels, K, TOKENS, CHANNELS)
    at = token[:, None] * channels + channel[None, :]
    sigmoid = 1.0 / (1.0 + tl.exp(-z))
    grad_z = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * sigmoid * (1.0 + z * (1.0 - sigmoid))
    tl.store(grad_z_ptr + at, grad_z.to(grad_z_ptr.dtype.element_ty), mask=inside)
    for s in tl.static_range(K):
        inputs = _inputs_before(x_ptr, state_ptr, token, age, row, channel, inside, x_stride, channels, s, K)
        place = (tl.program_id(0).to(tl.int64) * K + (K - 1 - s)) * channels + channel
        tl.store(grad_weight_ptr + place, tl.sum(grad_z * inputs, 0), mask=channel < channels)


@triton.jit
def _gradient_of_inputs(
    grad_z_ptr, weight_ptr, age_ptr, grad_x_ptr, num_tokens, channels,
    K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    grad = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for s in tl.static_range(K):
        later = token + s
        # of the same row: as many of its tokens are before it
        follows = (later < num_tokens) & (tl.load(age_ptr + later, mask=later < num_tokens, other=-1) >= s)
        mask = follows[:, None] & (channel < channels)[None, :]
        weight = tl.load(weight_ptr + channel * K + (K - 1 - s), mask=channel < channels, other=0.0).to(tl.float32)
        grad_z = tl.load(grad_z_ptr + later[:, None] * channels + channel[None, :], mask=mask, other=0.0)
        grad += weight[None, :] * grad_z.to(tl.float32)
    inside = (token < num_tokens)[:, None] & (channel < channels)[None, :]
    at = token[:, None] * channels + channel[None, :]
    tl.store(grad_x_ptr + at, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)


class _PackedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, state: Tensor | None, age: Tensor, row: Tensor, starts: Tensor
    ) -> Tensor:
        (num_tokens, channels), width = x.shape, weight.shape[1]
        ctx.save_for_backward(x, weight, state, age, row, starts)
        y = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(num_tokens, TOKENS), triton.cdiv(channels, CHANNELS))
        _forward[grid](
            x, weight, state, age, row, y, num_tokens, x.stride(0), channels, width, TOKENS, CHANNELS
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, state, age, row, starts = ctx.saved_tensors
        (num_tokens, channels), width = x.shape, weight.shape[1]
        grad = grad.contiguous()
        blocks = triton.cdiv(num_tokens, TOKENS)
        grad_z, grad_x = (torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device) for _ in range(2))
        parts = torch.empty(blocks, width, channels, dtype=torch.float32, device=x.device)
        grid = (blocks, triton.cdiv(channels, CHANNELS))
        _gradient_of_sum[grid](
            *(x, weight, state, age, row, grad, grad_z, parts, num_tokens, x.stride(0), channels),
            *(width, TOKENS, CHANNELS),
        )
        _gradient_of_inputs[grid](grad_z, weight, age, grad_x, num_tokens, channels, width, TOKENS, CHANNELS)
        grad_state = None
        if state is not None and ctx.needs_input_grad[2]:
            grad_state = _gradient_of_state(grad_z, weight, state, age, starts)
        return grad_x, parts.sum(0).t().to(weight.dtype), grad_state, None, None, None


def _gradient_of_state(grad_z: Tensor, weight: Tensor, state: Tensor, age: Tensor, starts: Tensor) -> Tensor:
    """Token `a` of a row reaches column m of its state by the weight m - 1 - a."""
    width = weight.shape[1]
    grads = torch.zeros(state.shape, dtype=torch.float32, device=state.device)
    for a in range(width - 1):
        at = (starts + a).clamp(max=len(age) - 1)
        grad_a = grad_z[at].float() * (age[at] == a)[:, None]  # 0 if the row is shorter
        for m in range(a + 1, width):
            grads[..., m] += grad_a * weight[:, m - 1 - a].float()
    return grads.to(state.dtype)


def packed_convolution(
    x: Tensor, weight: Tensor, state: Tensor | None, age: Tensor, row: Tensor, starts: Tensor
) -> Tensor:
    """x (T, C), weight (C, K) -> (T, C).

    state: (N, C, K) inputs before each row; None if there are none. age, row: (T,) int32 of each token. starts: (N,) first token
    of each row, none of which is empty.
    """
    assert x.stride(1) == 1, f"strides {x.stride()}"
    contiguous = None if state is None else state.contiguous()
    out: Tensor = _PackedConvolution.apply(x, weight.contiguous(), contiguous, age, row, starts)
    return out
