"""The per-token data of a step or a validation (`trainer.rollout_token_data`): batches ─► `observability/token_file.py`."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.config.old_log_probs import OldLogProbs
from lockstep.config.trainer import TrainerConfig
from lockstep.observability import token_file
from lockstep.protocol import DataProto
from lockstep.protocol.columns import Batch
from lockstep.protocol.ragged import Ragged
from lockstep.protocol.tokens import column, lengths_of, token_rows
from lockstep.utils.token_pieces import TokenPieces

FROM_THE_PASS = ("old_log_probs", "entropys")
"""Columns that are the trainer's own only if the step had a pass for old log-probs."""


class TokenDump:
    """Collects the tokens of the first responses, whole groups as long as they fit, and no more than `token_file.MOST_TOKENS`.

    max_rows:      responses that are kept; without any, `write` removes what an earlier run of the step wrote.
    old_log_probs: where the old log-probs of the step come from; None in validation.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_rows: int, old_log_probs: OldLogProbs | None = None
    ) -> None:
        self.max_rows = max_rows
        self.old_log_probs = old_log_probs
        self._tokenizer = tokenizer
        self._num_seen = 0
        self._num_tokens = 0
        self._columns: dict[str, list[Any]] = {"row": [], "uid": []}

    @classmethod
    def asked_for(
        cls, config: TrainerConfig, tokenizer: PreTrainedTokenizerBase, old_log_probs: OldLogProbs | None = None
    ) -> "TokenDump":
        """With as many rows as the config says."""
        return cls(tokenizer, config.rollout_token_rows if config.rollout_token_data else 0, old_log_probs)

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self._tokenizer)

    @property
    def num_rows(self) -> int:
        return len(self._columns["row"])

    def add(self, batch: DataProto, uids: Sequence[str]) -> None:
        """The next rows of the dump, with their uids in it."""
        first, self._num_seen = self._num_seen, self._num_seen + len(batch)
        if self.num_rows >= self.max_rows:
            return
        prompt_B, response_B = lengths_of(batch.tensors)
        sizes = (prompt_B + response_B).tolist()
        room, room_for_tokens = self.max_rows - self.num_rows, token_file.MOST_TOKENS - self._num_tokens
        rows = first_groups(uids, sizes, room, room_for_tokens, may_split=self.num_rows == 0)
        if not rows:
            return
        self._num_tokens += sum(sizes[row] for row in rows)
        numbers = [name for name in token_file.NUMBERS if name not in FROM_THE_PASS or self.old_log_probs == "pass"]
        names = [name for name in ("response_mask", "policy_versions", *numbers) if name in batch.tensors]
        tensors = batch.select(["prompts", "responses", "attention_mask", *names], []).select_idxs(rows).tensors
        found: dict[str, list[Any]] = {"row": [first + row for row in rows], "uid": [uids[row] for row in rows]}
        for name in ("prompts", "responses"):
            found[name] = [row.numpy() for row in token_rows(tensors, name)]
            found[f"{name[:-1]}_pieces"] = [self._pieces(ids.tolist()) for ids in found[name]]
        lengths = lengths_of(tensors)[1].tolist()
        found |= {name: _entries(tensors, name, lengths) for name in names}
        for name in found:
            self._columns.setdefault(name, []).extend(found[name])

    def write(self, folder: str, step: int) -> None:
        """Write them beside the step's dump."""
        path = token_file.token_path(Path(folder).expanduser() / f"{step}.jsonl")
        if self.num_rows == 0:
            path.unlink(missing_ok=True)
            return
        columns = {name: values for name, values in self._columns.items() if len(values) == self.num_rows}
        token_file.write(path, columns, {"step": step, "old_log_probs": self.old_log_probs})


def first_groups(
    uids: Sequence[str], sizes: Sequence[int], room: int, room_for_tokens: int, may_split: bool = True
) -> list[int]:
    """Rows that fit, in order: those of the first groups that fit whole or, if not even one does, the first rows.

    sizes:     tokens of each row.
    may_split: False gives no rows then.
    """
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    chosen = _that_fit(list(groups.values()), sizes, room, room_for_tokens)
    if not chosen and may_split:
        chosen = _that_fit([[row] for row in range(len(uids))], sizes, room, room_for_tokens)
    return sorted(chosen)


def _that_fit(groups: list[list[int]], sizes: Sequence[int], room: int, room_for_tokens: int) -> list[int]:
    """The rows of the first groups."""
    chosen: list[int] = []
    for rows in groups:
        room -= len(rows)
        room_for_tokens -= sum(sizes[row] for row in rows)
        if min(room, room_for_tokens) < 0:
            break
        chosen += rows
    return chosen


def _entries(tensors: Batch, name: str, lengths: Sequence[int]) -> list[np.ndarray]:
    """The entries of each row at its response tokens."""
    stored = column(tensors, name)
    if isinstance(stored, Ragged):
        values, starts = stored.values.numpy(), (stored.lengths.cumsum(0) - stored.lengths).tolist()
        return [values[start : start + length] for start, length in zip(starts, lengths)]
    return [row[:length] for row, length in zip(stored.numpy(), lengths)]
