"""One token of Gated DeltaNet per row, in place on the states of its slots: the convolution, then the gated delta rule.

    window = window shifted by the new input;  q, k, v = silu(window · weight)
    S = exp(g) S;  S += k (β (v - Sᵀ k))ᵀ;  out = Sᵀ q         g = -exp(A_log) softplus(a + dt_bias), β = sigmoid(b)

with q and k of unit length, and q divided by √DK. Sums are in float32; q, k, v and β are rounded to the inputs' dtype, as the
reference (`GatedDelta.step`, `models/gated_delta.py`) rounds them. A program of the second kernel holds TILE columns of the state
of one row and value head. Rows of the same slot overwrite each other, as those of the scratch slot may.

Shapes: x (N, C + 2 HV): q, k (HK * DK each), v (HV * DV), b and a (HV each), C = 2 HK * DK + HV * DV. States by slot: conv
(slots, C, K), recurrent (slots, HV, DK, DV) in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 512
"""Channels of the convolution per program."""
TILE = 64
"""Columns of the state per program."""


@triton.jit
def _convolution(
    x_ptr, weight_ptr, window_ptr, slots_ptr, out_ptr, x_stride, channels, K: tl.constexpr,
    K_PADDED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    slot = tl.load(slots_ptr + row).to(tl.int64)
    j = tl.arange(0, K_PADDED)[None, :]
    window = window_ptr + (slot * channels + channel)[:, None] * K + j
    entries = inside[:, None] & (j < K)
    new = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0).to(window_ptr.dtype.element_ty)
    shifted = tl.load(window + 1, mask=entries & (j < K - 1), other=0.0)
    shifted = tl.where(j == K - 1, new[:, None], shifted)
    tl.debug_barrier()  # an entry is overwritten by another thread than the one that reads it
    tl.store(window, shifted, mask=entries)
    weight = tl.load(weight_ptr + channel[:, None] * K + j, mask=entries, other=0.0).to(tl.float32)
    total = tl.sum(shifted.to(tl.float32) * weight, 1)
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row * channels + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _unit(x):
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) + 1e-6))


@triton.jit
def _load_token(
    qkv_ptr, x_ptr, token, d, e, key_head, head, x_stride, channels,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """q, k (DK_PADDED,), v (TILE,), b and a of a token."""
    qkv = qkv_ptr + token * channels
    q = tl.load(qkv + key_head * DK + d, mask=d < DK, other=0.0)
    k = tl.load(qkv + (HK + key_head) * DK + d, mask=d < DK, other=0.0)
    v = tl.load(qkv + 2 * HK * DK + head * DV + e, mask=e < DV, other=0.0)
    b = tl.load(x_ptr + token * x_stride + channels + head)
    a = tl.load(x_ptr + token * x_stride + channels + HV + head)
    return q, k, v, b, a


@triton.jit
def _next_state(state, q, k, v, b, a, rate, dt_bias, scale):
    """The state (DK_PADDED, TILE) after a token, and its output (TILE,) in float32. rate: exp(A_log)."""
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
    dt = a.to(tl.float32) + dt_bias
    softplus = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
    q = _unit(q.to(tl.float32)) * scale
    k = _unit(k.to(tl.float32))
    state *= tl.exp(-rate * softplus)
    delta = (v.to(tl.float32) - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * delta[None, :]
    return state, tl.sum(state * q[:, None], 0)


@triton.jit
def _rule(
    qkv_ptr, x_ptr, a_log_ptr, dt_bias_ptr, state_ptr, slots_ptr, out_ptr, x_stride, channels, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, DK_PADDED)
    e = tl.program_id(2) * TILE + tl.arange(0, TILE)
    key_head = head // (HV // HK)
    q, k, v, b, a = _load_token(qkv_ptr, x_ptr, row, d, e, key_head, head, x_stride, channels, HK, HV, DK, DV)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    at = state_ptr + (slot * HV + head) * (DK * DV) + d[:, None] * DV + e[None, :]
    inside = (d < DK)[:, None] & (e < DV)[None, :]
    state, out = _next_state(tl.load(at, mask=inside, other=0.0), q, k, v, b, a, rate, dt_bias, scale)
    tl.store(at, state, mask=inside)
    tl.store(out_ptr + (row * HV + head) * DV + e, out.to(out_ptr.dtype.element_ty), mask=e < DV)


def delta_step(
    x: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv: Tensor,
    recurrent: Tensor,
    slots: Tensor,
    key_heads: int,
) -> Tensor:
    """x (N, C + 2 HV), slots (N,) -> (N, HV * DV); the states in the slots become those after the token.

    weight: (C, K) of the convolution. a_log, dt_bias: (HV,). conv, recurrent: states of all slots. No gradient, no synchronisation
    with the host.
    """
    num_rows = len(x)
    _, value_heads, key_dim, value_dim = recurrent.shape
    _, channels, width = conv.shape
    assert x.stride(1) == 1 and x.shape[1] == channels + 2 * value_heads, f"{tuple(x.shape)}, strides {x.stride()}"
    assert conv.is_contiguous() and recurrent.is_contiguous() and weight.is_contiguous()
    assert recurrent.dtype == torch.float32
    qkv = torch.empty(num_rows, channels, dtype=x.dtype, device=x.device)
    out = torch.empty(num_rows, value_heads * value_dim, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    grid = (num_rows, triton.cdiv(channels, CHANNELS))
    _convolution[grid](
        x, weight, conv, slots, qkv, x.stride(0), channels, width, triton.next_power_of_2(width), CHANNELS
    )  # fmt: skip
    tile = min(TILE, triton.next_power_of_2(value_dim))
    _rule[(num_rows, value_heads, triton.cdiv(value_dim, tile))](
        *(qkv, x, a_log, dt_bias, recurrent, slots, out, x.stride(0), channels, key_dim**-0.5),
        *(key_heads, value_heads, key_dim, triton.next_power_of_2(key_dim), value_dim, tile),
    )
    return out
