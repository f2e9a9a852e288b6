"""Text and JSON that come from outside: from models, tools, programs and clients."""

import re
import unicodedata

JSON_ERRORS = (ValueError, RecursionError)
"""What `json.loads` raises for such text: JSONDecodeError, numbers with too many digits, and deep nesting."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CHAT_TOKEN = re.compile(
    r"<[|｜](?=[^|｜\s<>]{1,40}[|｜]>)|</?s>|<</?SYS>>|</?(?:start|end)_of_turn>|\[/?(?:INST|TOOL_\w+|AVAILABLE_TOOLS)\]"
)
"""Tokens of chat templates: ChatML, Llama, Mistral, Gemma, DeepSeek and GPT-OSS."""
_KEPT = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Control and format characters that a text needs and that move nothing on a screen."""
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


def printable(text: str) -> str:
    """The text without what a terminal would obey: control characters, and with them escape sequences, marks that reorder text, and
    lone surrogates become U+FFFD. Everything that may hold a model's text goes through here before it is written to a terminal.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_shown(char) else REPLACEMENT for char in text)


def _is_shown(char: str) -> bool:
    return char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs"


def as_plain_text(text: str) -> str:
    """A policy's text for another model's endpoint: a space in each chat token, so that it cannot end its turn and begin another.

    The endpoint's own tokenizer is not known.
    """
    return CHAT_TOKEN.sub(lambda token: f"{token[0][0]} {token[0][1:]}", text)


def message_of(error: BaseException, max_chars: int = 300) -> str:
    """The message of an exception that other code raised, which may be long, invalid text or raise an exception itself."""
    try:
        return valid_text(str(error)[:max_chars])
    except Exception:  # noqa: BLE001 - `__str__` of other code may raise anything
        return "(its message cannot be read)"
