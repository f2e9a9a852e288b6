"""Token lists to padded tensors: truncation, padding and position ids."""

from collections.abc import Sequence
from typing import Literal

import torch

Truncation = Literal["error", "left", "right", "middle"]


def kept_ends(length: int, max_length: int, truncation: Truncation) -> tuple[int, int]:
    """How many tokens to keep at the head and at the tail of a sequence of `length` tokens.

    `left` drops the beginning, `right` the end, `middle` the middle; `error` rejects an overlong sequence.
    """
    if length <= max_length:
        return length, 0
    if truncation == "left":
        return 0, max_length
    if truncation == "right":
        return max_length, 0
    if truncation == "middle":
        return max_length // 2, max_length - max_length // 2
    if truncation == "error":
        raise ValueError(f"{length} tokens, but at most {max_length} are allowed")
    raise ValueError(f"truncation={truncation!r}: must be error, left, right or middle")


def truncate_ids(ids: list[int], max_length: int, truncation: Truncation) -> list[int]:
    """Truncate `ids` to `max_length`; see `kept_ends`."""
    head, tail = kept_ends(len(ids), max_length, truncation)
    return ids[:head] + ids[len(ids) - tail :]


def postprocess_data(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Truncation = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncate or pad a (B, L) batch to (B, max_length): ids with `pad_token_id`, the mask with 0."""
    if input_ids.dim() != 2 or input_ids.shape != attention_mask.shape:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)} must have the same shape (B, L)"
        )
    length = input_ids.shape[1]
    head, tail = kept_ends(length, max_length, truncation)
    pad = (max_length - head - tail, 0) if left_pad else (0, max_length - head - tail)

    def fit(rows: torch.Tensor, fill: int) -> torch.Tensor:
        kept = torch.cat([rows[:, :head], rows[:, length - tail :]], dim=1)
        return torch.nn.functional.pad(kept, pad, value=fill)

    return fit(input_ids, pad_token_id), fit(attention_mask, 0)


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Positions of the attended tokens, from 0; left padding gets 0."""
    return (torch.cumsum(mask.long(), dim=-1) - 1).clamp(min=0)


def pad_prompts(prompts: Sequence[Sequence[int]], length: int, pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-pad prompts to (B, length) int64: input_ids and attention_mask."""
    input_ids = torch.full((len(prompts), length), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        if len(ids) > length:
            raise ValueError(f"prompt {row} has {len(ids)} tokens, more than data.max_prompt_length={length}")
        if ids:
            input_ids[row, length - len(ids) :] = torch.tensor(ids, dtype=torch.int64)
            attention_mask[row, length - len(ids) :] = 1
    return input_ids, attention_mask
