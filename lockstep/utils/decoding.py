"""Decode token ids to text."""

from typing import Any


def decode_all(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """The text of each row without special tokens, equal to `tokenizer.batch_decode`.

    Calls the Rust tokenizer directly if `batch_decode` is not overridden, to avoid a Python loop over tokens.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    cls: Any = type(tokenizer)
    is_plain_fast = (
        isinstance(tokenizer, Fast)
        and cls._decode is Fast._decode
        and cls.decode is Fast.decode
        and cls.batch_decode is Fast.batch_decode
        and not tokenizer.clean_up_tokenization_spaces
    )
    decode = tokenizer.backend_tokenizer.decode_batch if is_plain_fast else tokenizer.batch_decode
    texts: list[str] = decode(rows, skip_special_tokens=True)
    return texts
