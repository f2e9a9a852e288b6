"""Text by models, tools and data on a terminal."""

import unicodedata

_KEPT = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Control and format characters that a text needs and that move nothing on the screen."""


def printable(text: str) -> str:
    """The text without what a terminal would obey: control characters, and with them escape sequences, marks that reorder text, and
    lone surrogates become U+FFFD. Everything that may hold a model's text goes through here before it is written to a terminal.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_shown(char) else "\N{REPLACEMENT CHARACTER}" for char in text)


def _is_shown(char: str) -> bool:
    return char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs"
