"""`decode_all` equals `batch_decode`."""

from typing import Any

import pytest

from lockstep.utils.decoding import decode_all
from tests.tiny import tiny_tokenizer

ROWS = [[5, 6, 7, 2], [], [2, 2], [9, 10, 11, 12, 13]]


def test_equals_batch_decode_without_calling_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    expected = [tokenizer.decode(row, skip_special_tokens=True) for row in ROWS]
    monkeypatch.setattr(tokenizer, "batch_decode", lambda *args, **options: pytest.fail("it was called"))
    assert decode_all(tokenizer, ROWS) == expected


def test_overridden_decode_is_used() -> None:
    plain = tiny_tokenizer()

    class Loud(type(plain)):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            text: str = super()._decode(*args, **kwargs)
            return text.upper() + "!"

    tokenizer = tiny_tokenizer()
    tokenizer.__class__ = Loud
    expected = [plain.decode(row, skip_special_tokens=True).upper() + "!" for row in ROWS[:1] + ROWS[2:]]
    assert decode_all(tokenizer, ROWS[:1] + ROWS[2:]) == expected


def test_clean_up_tokenization_spaces_is_respected() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    assert decode_all(tokenizer, ROWS) == tokenizer.batch_decode(ROWS, skip_special_tokens=True)


def test_other_tokenizers_only_need_batch_decode() -> None:
    class Fake:
        def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
            assert skip_special_tokens
            return [str(sum(row)) for row in rows]

    assert decode_all(Fake(), ROWS) == ["20", "0", "4", "55"]
