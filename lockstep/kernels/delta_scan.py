"""The gated delta rule over packed rows, token after token: without gradients, each row from its own state.

The mathematics is that of `kernels/delta_step.py`, which describes the shapes. A program holds TILE columns of the state of
one row and value head in registers, and loads a token's inputs while it computes the token before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.delta_step import load_token, next_state

TILE = 8
"""Columns of the state per program, which is one warp: sums over the keys need no barrier."""


@triton.jit
def _scan(
    qkv_ptr, x_ptr, a_log_ptr, dt_bias_ptr, before_ptr, after_ptr, bounds_ptr, out_ptr, x_stride, channels, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, DK_PADDED)
    e = tl.program_id(2) * TILE + tl.arange(0, TILE)
    key_head = head // (HV // HK)
    start = tl.load(bounds_ptr + row)
    stop = tl.load(bounds_ptr + row + 1)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    at = (row * HV + head) * (DK * DV) + d[:, None] * DV + e[None, :]
    inside = (d < DK)[:, None] & (e < DV)[None, :]
    state = tl.zeros([DK_PADDED, TILE], tl.float32)
    if before_ptr is not None:
        state += tl.load(before_ptr + at, mask=inside, other=0.0)
    q, k, v, b, a = load_token(
        qkv_ptr, x_ptr, start, d, e, key_head, head, x_stride, channels, start < stop, HK, HV, DK, DV
    )  # fmt: skip
    for token in range(start, stop):
        later = token + 1
        next_q, next_k, next_v, next_b, next_a = load_token(
            qkv_ptr, x_ptr, later, d, e, key_head, head, x_stride, channels, later < stop, HK, HV, DK, DV
        )  # fmt: skip
        state, out = next_state(state, q, k, v, b, a, rate, dt_bias, scale)
        tl.store(out_ptr + (token * HV + head) * DV + e, out.to(out_ptr.dtype.element_ty), mask=e < DV)
        q, k, v, b, a = next_q, next_k, next_v, next_b, next_a
    tl.store(after_ptr + at, state, mask=inside)


def delta_scan(
    qkv: Tensor,
    x: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    before: Tensor | None,
    bounds: Tensor,
    keys: tuple[int, int],
    values: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """The output (T, HV * DV), and the states (N, HV, DK, DV) in float32 after the last token of each row.

    qkv: (T, C) after the convolution. x: (T, C + 2 HV) the input, of which b and a are read. before: states before the rows; None
    if there are no tokens before them. bounds: (N + 1,) where the rows begin and end. keys: HK, DK. values: HV, DV. No gradient.
    """
    (key_heads, key_dim), (value_heads, value_dim) = keys, values
    (num_tokens, channels), num_rows = qkv.shape, len(bounds) - 1
    assert qkv.is_contiguous() and x.stride(1) == 1, f"strides {qkv.stride()}, {x.stride()}"
    assert x.shape == (num_tokens, channels + 2 * value_heads), f"{tuple(x.shape)} beside {tuple(qkv.shape)}"
    assert channels == 2 * key_heads * key_dim + value_heads * value_dim
    out = torch.empty(num_tokens, value_heads * value_dim, dtype=x.dtype, device=x.device)
    after = torch.empty(num_rows, value_heads, key_dim, value_dim, dtype=torch.float32, device=x.device)
    if before is not None:
        before = before.contiguous()
        assert before.dtype == torch.float32 and before.shape == after.shape
    if num_rows:
        _scan[(num_rows, value_heads, triton.cdiv(value_dim, TILE))](
            *(qkv, x, a_log, dt_bias, before, after, bounds, out, x.stride(0), channels, key_dim**-0.5),
            *(key_heads, value_heads, key_dim, triton.next_power_of_2(key_dim), value_dim, TILE),
            num_warps=1,
        )
    return out, after
