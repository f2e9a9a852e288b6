"""Contents of chat messages, which are text or lists of parts, as text."""

from collections.abc import Mapping
from typing import Any


def content_text(content: Any) -> str:
    """The text of a content, with `<image>` for each of its images."""
    if not isinstance(content, list | tuple):
        return str(content or "")
    return "".join(str(part["text"]) if isinstance(part, Mapping) and "text" in part else "<image>" for part in content)
