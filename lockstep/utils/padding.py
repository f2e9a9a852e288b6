"""Pad token rows to the same length."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
