"""Contents of chat messages, which are text or lists of parts, as text."""

from collections.abc import Mapping
from typing import Any


def content_text(content: Any) -> str:
    """The text of a content, with `<image>` for each of its images and `<video>` for each video."""
    if not isinstance(content, list | tuple):
        return str(content or "")
    return "".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return "<image>"
    return str(part["text"]) if "text" in part else "<video>" if part.get("type") == "video" else "<image>"
