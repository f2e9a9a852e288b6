"""The bytes that each token of a tokenizer stands for."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of a SentencePiece vocabulary that is one byte."""


class TokenPieces:
    """Joined, the pieces of a text's tokens are its bytes in UTF-8, also if a character is split over several tokens.

    Special tokens are written as they are named, and the space that some SentencePiece vocabularies put before a text is kept:
    decoders drop both. Of tokenizers that are neither byte-level nor SentencePiece each token is decoded by itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._decoders = _decoders_of(tokenizer)
        self._known: dict[int, bytes] = {}

    def __call__(self, ids: Sequence[int]) -> list[bytes]:
        """One piece per token."""
        if new := sorted(set(ids).difference(self._known)):
            self._known |= zip(new, self._pieces(new))
        return [self._known[token] for token in ids]

    def _pieces(self, ids: list[int]) -> Iterator[bytes]:
        types = {decoder["type"] for decoder in self._decoders}
        if not types & {"ByteLevel", "ByteFallback", "Metaspace"}:
            return (_utf8(self.tokenizer.decode([token], skip_special_tokens=False)) for token in ids)
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        if "ByteLevel" in types:
            return (_of_byte_level(token or "") for token in tokens)
        return (_of_sentencepiece(token or "", _spaces(self._decoders)) for token in tokens)


def _decoders_of(tokenizer: Any) -> list[dict[str, Any]]:
    """The steps of the Rust tokenizer's decoder; empty without one, and for one written in Python, which cannot be serialized."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # noqa: BLE001 - tokenizers raises no narrower one
        return []
    return list(_flat(state))


def _flat(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for inner in decoder["decoders"]:
        yield from _flat(inner)


def _spaces(decoders: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """What stands for something else in tokens, such as ▁ for a space."""
    found = []
    for decoder in decoders:
        if decoder["type"] == "Metaspace":
            found.append((decoder["replacement"], " "))
        elif decoder["type"] == "Replace" and "String" in decoder["pattern"]:
            found.append((decoder["pattern"]["String"], decoder["content"]))
    return found


def _of_byte_level(token: str) -> bytes:
    table = _byte_of_char()
    return bytes(table[char] for char in token) if all(char in table for char in token) else _utf8(token)


def _of_sentencepiece(token: str, spaces: list[tuple[str, str]]) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    for written, meant in spaces:
        token = token.replace(written, meant)
    return _utf8(token)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


@cache
def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
