"""verl.models.transformers.qwen2_vl: positions of text, images and videos in Qwen2-VL's three rope dimensions."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lockstep.verl._names import exports

__getattr__ = exports(__name__)


def get_rope_index(
    processor: Any,
    input_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """(3, T) positions of one row (T,): time, height and width; text has the same in all three.

    processor:          has the merge size of the vision tower, the tokens of images and videos, and for Qwen2.5-VL
                        `tokens_per_second`.
    image_grid_thw:     (number of images, 3) patches of each; videos likewise.
    second_per_grid_ts: seconds per temporal patch of each video.
    """
    merge = int(processor.image_processor.merge_size)
    speed = float(getattr(processor, "tokens_per_second", 1.0))
    kinds: dict[int, Any] = {
        processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"): iter(
            [] if image_grid_thw is None else image_grid_thw
        ),
        processor.tokenizer.convert_tokens_to_ids("<|video_pad|>"): iter(
            [] if video_grid_thw is None else video_grid_thw
        ),
    }
    video_token = processor.tokenizer.convert_tokens_to_ids("<|video_pad|>")
    seconds = iter([1.0] * len(input_ids) if second_per_grid_ts is None else list(second_per_grid_ts))
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    tokens = input_ids[mask.bool()].tolist()
    parts: list[Tensor] = []
    start = 0
    for token, run in groupby(tokens, key=lambda token: token if token in kinds else None):
        length = len(list(run))
        if token is None:
            parts.append((torch.arange(length) + start).expand(3, -1))
            start += length
            continue
        while length > 0:
            frames, rows, columns = (int(n) for n in next(kinds[token]))
            pace = float(next(seconds)) * speed if token == video_token and second_per_grid_ts is not None else 1.0
            grid = _grid(frames, rows // merge, columns // merge, pace)
            parts.append(grid + start)
            start += int(grid.max()) + 1
            length -= grid.shape[1]
    positions = torch.ones(3, len(input_ids), dtype=input_ids.dtype, device=input_ids.device)
    positions[:, mask.bool()] = torch.cat(parts, 1).to(positions)
    return positions


def _grid(frames: int, rows: int, columns: int, pace: float) -> Tensor:
    """(3, frames * rows * columns) places of the patches."""
    time = (torch.arange(frames) * pace).long().repeat_interleave(rows * columns)
    height = torch.arange(rows).repeat_interleave(columns).repeat(frames)
    return torch.stack((time, height, torch.arange(columns).repeat(frames * rows)))
