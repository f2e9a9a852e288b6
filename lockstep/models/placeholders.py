"""Tokens that stand for features of images and videos: they are part of prompts only, and no engine samples them."""

from typing import Any

_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Of a model's config; empty for a model without a vision tower."""
    if getattr(config, "vision_config", None) is None:
        return ()
    vocab_size = config.get_text_config().vocab_size
    found = {getattr(config, name, None) for name in _NAMES}
    return tuple(sorted(token for token in found if token is not None and 0 <= token < vocab_size))
