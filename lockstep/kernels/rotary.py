"""Triton kernel of the rotary position embedding of queries and keys: x * cos + rotate_half(x) * sin, rounded once."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x_ptr, out_ptr, token, stride_head, stride_token, c1, c2, s1, s2,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS_PADDED)
    d = tl.arange(0, HALF_PADDED)
    inside = (head < HEADS)[:, None] & (d < HALF)[None, :]
    source = x_ptr + token * stride_token + head[:, None] * stride_head + d[None, :]
    x1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    target = out_ptr + (token * HEADS + head[:, None]) * (2 * HALF) + d[None, :]
    tl.store(target, (x1 * c1[None, :] - x2 * s1[None, :]).to(dtype), mask=inside)
    tl.store(target + HALF, (x2 * c2[None, :] + x1 * s2[None, :]).to(dtype), mask=inside)


@triton.jit
def _rotary(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, q_head, q_token, k_head, k_token,
    Q_HEADS: tl.constexpr, Q_PADDED: tl.constexpr, K_HEADS: tl.constexpr, K_PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_PADDED)
    inside = d < HALF
    at = token * (2 * HALF) + d
    c1 = tl.load(cos_ptr + at, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cos_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sin_ptr + at, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sin_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    _rotate(q_ptr, q_out_ptr, token, q_head, q_token, c1, c2, s1, s2, Q_HEADS, Q_PADDED, HALF, HALF_PADDED)
    _rotate(k_ptr, k_out_ptr, token, k_head, k_token, c1, c2, s1, s2, K_HEADS, K_PADDED, HALF, HALF_PADDED)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q (1, H, T, D), k (1, HK, T, D), cos and sin (1, T, D) -> both rotated; any strides but the last, which is 1."""
    _, q_heads, length, dim = q.shape
    k_heads = k.shape[1]
    q_out = torch.empty(1, length, q_heads, dim, dtype=q.dtype, device=q.device)
    k_out = torch.empty(1, length, k_heads, dim, dtype=k.dtype, device=k.device)
    _rotary[(length,)](
        *(q, k, cos.contiguous(), sin.contiguous(), q_out, k_out),
        *(q.stride(1), q.stride(2), k.stride(1), k.stride(2)),
        *(q_heads, triton.next_power_of_2(q_heads), k_heads, triton.next_power_of_2(k_heads)),
        *(dim // 2, triton.next_power_of_2(dim // 2)),
    )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
