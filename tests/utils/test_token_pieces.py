"""Pieces of tokens: joined they are the text."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.utils.token_pieces import TokenPieces
from tests.tiny import tiny_tokenizer

TEXTS = ["plain words", "中文 and 😀👩‍👩‍👧 é\n\t ends ", "\u202eabc\u200b", "\x1b[31mred\x00"]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A vocabulary with ▁ for spaces and a token for each byte, as that of Llama 2."""
    words = ["<s>", "▁plain", "▁words", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    assert b"".join(TokenPieces(tokenizer)(ids)).decode() == text == tokenizer.decode(ids)


def test_characters_are_split_and_special_tokens_named() -> None:
    tokenizer = tiny_tokenizer()
    pieces = TokenPieces(tokenizer)
    assert pieces(tokenizer.encode("中<|im_end|>")) == [b"\xe4", b"\xb8", b"\xad", b"<|im_end|>"]
    assert pieces([10**6]) == [b""], "an id of no token, as padded vocabularies have them"


def test_pieces_of_sentencepiece_tokens_join_to_the_text() -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.convert_tokens_to_ids(["▁plain", "▁words", "▁", *(f"<0x{byte:02X}>" for byte in "中".encode())])
    pieces = TokenPieces(tokenizer)(ids)
    assert pieces == [b" plain", b" words", b" ", b"\xe4", b"\xb8", b"\xad"]
    assert b"".join(pieces).decode() == " " + tokenizer.decode(ids)


def test_other_tokenizers_decode_each_token() -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert TokenPieces(fast)([1, 0, 1]) == [b"two", b"one", b"two"]


def test_a_decoder_written_in_python_is_used_token_by_token() -> None:
    class Upper:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            return [token.upper() for token in tokens]

    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.backend_tokenizer.decoder = decoders.Decoder.custom(Upper())
    with pytest.raises(Exception, match="cannot be serialized"):
        fast.backend_tokenizer.decoder.__getstate__()
    assert TokenPieces(fast)([1, 0]) == [b"TWO", b"ONE"]
