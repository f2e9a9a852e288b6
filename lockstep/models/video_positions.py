"""Rotary positions after a video, for models whose position in time runs ahead of the frames' height and width.

    text 0 1 2 | video: time 3 … 3 + t, height 3 … 3 + h, width 3 … 3 + w | text 4 + max(t, h, w) …

Qwen2-VL and Qwen2.5-VL were trained so: text goes on after the largest position of the video. transformers 5.3 and newer go on
after the larger side of a frame, so that a long video shares positions with the text after it, and `generate` places the tokens
that it samples elsewhere than a forward of the whole sequence does. Images, and Qwen3-VL, whose frames have one position in time
each, are the same either way.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

VIDEO = 2
"""Of a token in `mm_token_type_ids`; text is 0, images 1."""


def continue_after_videos(positions: Tensor, kinds: Tensor) -> Tensor:
    """positions (3, L) of a sequence, with those after each video moved behind its largest one. kinds: (L) of its tokens."""
    is_video = (kinds == VIDEO).int()
    steps = is_video.diff(prepend=is_video.new_zeros(1))
    starts, ends = (steps == 1).nonzero()[:, 0].tolist(), (steps == -1).nonzero()[:, 0].tolist()
    if not ends:
        return positions
    positions = positions.clone()
    for start, end in zip(starts, ends):
        overlap = int(positions[:, start:end].max()) + 1 - int(positions[0, end])
        positions[:, end:] += max(overlap, 0)
    return positions


def fix_video_positions(model: PreTrainedModel) -> None:
    """Let the model's own forward and `generate` do so too."""
    base: Any = model.base_model
    if hasattr(type(base), "get_rope_index"):
        base.get_rope_index = MethodType(get_rope_index, base)


def get_rope_index(
    self: Any, input_ids: Tensor, mm_token_type_ids: Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The model's own, with positions that go on after videos."""
    own = type(self).get_rope_index
    positions, deltas = own(self, input_ids, mm_token_type_ids, *args, attention_mask=attention_mask, **kwargs)
    if not (mm_token_type_ids == VIDEO).any():
        return positions, deltas
    deltas = torch.empty_like(deltas)
    for row, kinds in enumerate(mm_token_type_ids):
        here = torch.ones_like(kinds, dtype=torch.bool) if attention_mask is None else attention_mask[row].bool()
        found = continue_after_videos(positions[:, row, here], kinds[here])
        positions[:, row, here] = found
        deltas[row] = found.max() + 1 - found.shape[1]
    return positions, deltas
