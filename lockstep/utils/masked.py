"""Masked sum, mean, variance and whitening, the response mask, and padding of rows to the same length.

A mask is 0/1 of any dtype (bool, int64, float32) and broadcasts against the values. Values at masked positions never
affect a sum, mean or variance, even if NaN or infinite; their gradient is exactly 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Axis = int | tuple[int, ...] | None


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Sum over the positions where `mask` is 1; 0 for an empty mask."""
    return torch.where(mask.bool(), values, 0.0).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Mean over the positions where `mask` is 1; 0 for an empty mask (or an empty row, with `axis`)."""
    count = mask.bool().expand_as(values).sum(dim=axis)
    return masked_sum(values, mask, axis) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over the positions where `mask` is 1.

    Unbiased (divided by n - 1) needs at least two positions; the biased variance of zero or one position is 0.
    """
    count = mask.bool().expand_as(values).sum()
    deviation = values - masked_mean(values, mask)
    if not unbiased:
        return masked_mean(deviation**2, mask)
    if count < 2:
        raise ValueError(f"the unbiased variance needs at least 2 positions with mask 1, the mask has {int(count)}")
    return masked_sum(deviation**2, mask) / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values scaled to unit variance and, with `shift_mean`, shifted to mean 0, both over the mask.

    Masked positions are transformed too: multiply by the mask if they must stay 0. Needs at least two positions.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including a row's first EOS token, 0 after; all 1 in a row without EOS. Shapes (B, R)."""
    ends = torch.as_tensor(eos_token, device=response_id.device)
    is_end = torch.isin(response_id, ends).long()
    return (is_end.cumsum(dim=-1) - is_end == 0).to(dtype)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """Pad `tensors` (B, L) to (B, max_seq_len); unchanged if already that long."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Right-pad rows to the longest of them, at least to `max_length`: (B, L) int64."""
    width = max([max_length or 0, *(len(row) for row in response)])
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response], dtype=torch.int64)
