"""Prompts as text, for servers that take no token ids. They tokenize it themselves, so the text must give exactly our tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lockstep.engines.rollout.server.http import ServerError

MAX_TRIES = 32
SHOWN = 60
"""Characters of a prompt in a message."""


class PromptText:
    """The text of prompts and the tokens of texts, with the special tokens that the tokenizer adds by itself.

    tokenizer: the run's; a server that serves the same model has the same.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = self.tokens_of("")

    def tokens_of(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text that is tokenized to `token_ids`; ServerError if there is none."""
        text = self._decoded(token_ids)
        check_same_tokens(self.tokens_of(text), token_ids, text, "the run's own tokenizer")
        return text

    def prompt_like(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens that have a text, made of the text of `token_ids`: at most as many, but one besides the added ones."""
        shortest = len(self._added) + 1  # servers refuse an empty text
        longest = max(len(token_ids), shortest)
        found = list(token_ids)
        for length in range(longest, max(longest - MAX_TRIES, shortest - 1), -1):
            found = self.tokens_of(self._decoded(found))[:length]
            text = self._decoded(found)
            if text and self.tokens_of(text) == found:
                return found
        raise ServerError(
            "no text gives tokens that its own tokenizer reads back: this tokenizer cannot be used with servers that take text"
        )

    def _decoded(self, token_ids: Sequence[int]) -> str:
        """Without the tokens that the tokenizer adds at the start."""
        start = len(self._added) if list(token_ids[: len(self._added)]) == self._added else 0
        return str(self._tokenizer.decode(list(token_ids[start:]), clean_up_tokenization_spaces=False))


def check_same_tokens(found: Sequence[int], meant: Sequence[int], text: str, where: str) -> None:
    """ServerError if a prompt was tokenized to other tokens than the run's."""
    if list(found) == list(meant):
        return
    places = (place for place, pair in enumerate(zip(found, meant)) if pair[0] != pair[1])
    place = next(places, min(len(found), len(meant)))
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    raise ServerError(
        f"{where} tokenizes the prompt {shown!r} to {len(found)} tokens, the run to {len(meant)}; they differ from token {place} "
        f"on ({_token(found, place)} instead of {_token(meant, place)}). A response to other tokens would not be of this prompt: "
        "serve the model with the run's tokenizer, or use vLLM or SGLang, which take token ids"
    )


def _token(token_ids: Sequence[int], place: int) -> str:
    return str(token_ids[place]) if place < len(token_ids) else "none"
