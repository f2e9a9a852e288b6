"""The gated delta rule over packed rows, CHUNK tokens at a time: without gradients, each row from its own state.

With γ the sum of g since the chunk began, S the state before it and u = β (v - Sᵀ k) of each token's own state, the rule of
`kernels/delta_step.py` (which describes the shapes) is

    (I + A) u = β (v - exp(γ) k S)           A_ij = β_i exp(γ_i - γ_j) k_i · k_j   for j < i
    out = exp(γ) q S + B u                   B_ij = exp(γ_i - γ_j) q_i · k_j       for j <= i
    S = exp(γ_end) S + (exp(γ_end - γ) k)ᵀ u

so all but the inverse of I + A are products. A program holds TILE columns of the state of one row and value head in registers, in
float32; products with the state, u, the inverse or B round to tf32 (10 bits) for inputs in half precision, and are tf32x3 for
float32.
Matrices are transposed in the code, so that the state is the left operand: entry (j, i) is key j and token i.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 16
"""Tokens at a time: the smallest product of the matrix units, and an inverse that is short to compute."""
TILE = 128
"""Columns of the state per program. Of the tiles of 32, 64 and 128 with 2, 4 and 8 warps, 128 with 4 are the fastest on an H200.
With Triton 3.6, 64 with 8 warps gave wrong results there: test another choice on the GPU."""


@triton.jit
def _inverse(a, CHUNK: tl.constexpr):
    """(I + a)^-1 of strictly upper a (CHUNK, CHUNK), column after column: substitution amplifies no rounding."""
    i = tl.arange(0, CHUNK)
    inverse = (i[:, None] == i[None, :]).to(tl.float32)
    rows = tl.trans(a)
    for column in range(1, CHUNK):
        weights = tl.sum(tl.where(i[:, None] == column, rows, 0.0), 0)
        inverse -= tl.where(i[None, :] == column, tl.sum(inverse * weights[None, :], 1)[:, None], 0.0)
    return inverse


@triton.jit
def _over_length(x):
    """1 over the length of each row of x, in float32."""
    x = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _scan(
    qkv_ptr, x_ptr, a_log_ptr, dt_bias_ptr, before_ptr, after_ptr, bounds_ptr, out_ptr, x_stride, channels, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // (HV // HK)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, DK_PADDED)
    e = tl.program_id(2) * TILE + tl.arange(0, TILE)
    start = tl.load(bounds_ptr + row)
    stop = tl.load(bounds_ptr + row + 1)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    at = (row * HV + head) * (DK * DV) + d[None, :] * DV + e[:, None]
    inside = (d < DK)[None, :] & (e < DV)[:, None]
    state = tl.zeros([TILE, DK_PADDED], tl.float32)
    if before_ptr is not None:
        state += tl.load(before_ptr + at, mask=inside, other=0.0)
    for first in range(start, stop, CHUNK):
        token = first + i
        own = token < stop
        qkv = qkv_ptr + token * channels
        keys = own[:, None] & (d < DK)[None, :]
        q = tl.load(qkv[:, None] + (key_head * DK + d)[None, :], mask=keys, other=0.0)
        k = tl.load(qkv[:, None] + ((HK + key_head) * DK + d)[None, :], mask=keys, other=0.0)
        values = (e < DV)[:, None] & own[None, :]
        v = tl.load(qkv[None, :] + (2 * HK * DK + head * DV + e)[:, None], mask=values, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + token * x_stride + channels + head, mask=own, other=0.0)
        a = tl.load(x_ptr + token * x_stride + channels + HV + head, mask=own, other=0.0)
        beta = tl.where(own, (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32), 0.0)
        dt = a.to(tl.float32) + dt_bias
        softplus = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
        g = tl.where(own, -rate * softplus, 0.0)
        k_unit, q_unit = _over_length(k), _over_length(q) * scale
        since = tl.cumsum(g, 0)
        whole = tl.sum(g, 0)
        decay = tl.exp(tl.where(i[:, None] <= i[None, :], since[None, :] - since[:, None], 0.0))
        by_key = decay * k_unit[:, None]
        kk = tl.dot(k, tl.trans(k), input_precision=PRECISION) * by_key * (beta * k_unit)[None, :]
        kq = tl.dot(k, tl.trans(q), input_precision=PRECISION) * by_key * q_unit[None, :]
        kk = tl.where(i[:, None] < i[None, :], kk, 0.0)
        kq = tl.where(i[:, None] <= i[None, :], kq, 0.0)
        passed = tl.exp(since)
        k, q = k.to(tl.float32), q.to(tl.float32)
        seen = tl.dot(state, tl.trans(k), input_precision=PRECISION) * (passed * k_unit)[None, :]
        u = tl.dot(beta[None, :] * (v - seen), _inverse(kk, CHUNK), input_precision=PRECISION)
        out = tl.dot(state, tl.trans(q), input_precision=PRECISION) * (passed * q_unit)[None, :]
        out += tl.dot(u, kq, input_precision=PRECISION)
        tl.store(
            out_ptr + (token[None, :] * HV + head) * DV + e[:, None], out.to(out_ptr.dtype.element_ty), mask=values
        )
        u *= (tl.exp(whole - since) * k_unit)[None, :]
        state = tl.exp(whole) * state + tl.dot(u, k, input_precision=PRECISION)
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
    tile = min(TILE, max(16, triton.next_power_of_2(value_dim)))
    if num_rows:
        _scan[(num_rows, value_heads, triton.cdiv(value_dim, tile))](
            *(qkv, x, a_log, dt_bias, before, after, bounds, out, x.stride(0), channels, key_dim**-0.5),
            *(key_heads, value_heads, key_dim, max(16, triton.next_power_of_2(key_dim)), value_dim, tile, CHUNK),
            "tf32x3" if x.dtype == torch.float32 else "tf32",
            num_warps=4,
        )
    return out, after
