"""Text and JSON that come from outside: from models, tools, programs and clients."""

import re

JSON_ERRORS = (ValueError, RecursionError)
"""What `json.loads` raises for such text: JSONDecodeError, numbers with too many digits, and deep nesting."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def valid_text(text: str) -> str:
    """`text` with a replacement character for each lone surrogate, which neither tokenizers nor files accept.

    JSON can write one: "\\ud800".
    """
    return text if is_valid(text) else _LONE_SURROGATE.sub(REPLACEMENT, text)


def is_valid(text: str) -> bool:
    """Whether it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def message_of(error: BaseException, max_chars: int = 300) -> str:
    """The message of an exception that other code raised, which may be long, invalid text or raise an exception itself."""
    try:
        return valid_text(str(error)[:max_chars])
    except Exception:  # noqa: BLE001 - `__str__` of other code may raise anything
        return "(its message cannot be read)"
