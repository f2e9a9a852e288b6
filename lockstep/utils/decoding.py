"""Tokens to texts."""

from typing import Any


def decode_all(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """The text of each row without special tokens, as `tokenizer.batch_decode` gives it.

    Where that would look at every token in Python and then ask the library below it, the library is asked at once.
    """
    from transformers import PreTrainedTokenizerFast as Usual

    kind: Any = type(tokenizer)
    is_usual = (
        isinstance(tokenizer, Usual)
        and kind._decode is Usual._decode
        and kind.decode is Usual.decode
        and kind.batch_decode is Usual.batch_decode
        and not tokenizer.clean_up_tokenization_spaces
    )
    decode = tokenizer.backend_tokenizer.decode_batch if is_usual else tokenizer.batch_decode
    texts: list[str] = decode(rows, skip_special_tokens=True)
    return texts
