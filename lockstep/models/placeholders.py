"""Tokens that stand for features of images and videos: they are part of prompts only, and no engine samples them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from lockstep.utils.vision import reads_images

_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Of a model's config; empty for a model without a vision tower."""
    if getattr(config, "vision_config", None) is None:
        return ()
    vocab_size = config.get_text_config().vocab_size
    found = {getattr(config, name, None) for name in _NAMES}
    return tuple(sorted(token for token in found if token is not None and 0 <= token < vocab_size))


def placeholders_in(folder: Path) -> tuple[int, ...]:
    """Of the model in a folder, which needs no weights; empty if it reads no images."""
    return placeholder_ids(AutoConfig.from_pretrained(folder)) if reads_images(folder) else ()


def tokens_among(token_ids: Tensor, tokens: Sequence[int]) -> Tensor:
    """Which token ids are among the tokens."""
    found = torch.zeros_like(token_ids, dtype=torch.bool)
    for token in tokens:
        found = found | token_ids.eq(token)
    return found
