"""One decode step that computes draft tokens too: sample the token after each of them, keep those up to the first that differs.

    last token + drafts of each row ─► one forward over the paged cache ─► sample every position ─► compare

Keys and values of drafts that were not kept stay in the cache, behind the sequence's computed tokens: later tokens overwrite them.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from lockstep.engines.rollout.embedded.scheduler import DecodeWindow, PrefillRow
from lockstep.engines.rollout.embedded.sequence import Sequence


def draft_rows(window: DecodeWindow) -> list[PrefillRow]:
    """The last token and the drafts of each sequence."""
    return [_row(sequence, list(window.drafts.get(sequence.index, ()))) for sequence, _ in window.rows]


def _row(sequence: Sequence, draft: list[int]) -> PrefillRow:
    known = len(sequence.tokens)
    return PrefillRow(sequence, known - 1, known + len(draft), draft=draft)


def sampled_positions(rows: Rows[PrefillRow]) -> tuple[list[Sequence], np.ndarray]:
    """The sequence and the position of each token that the rows sample."""
    sequences = [row.sequence for row in rows for _ in range(row.start, row.stop)]
    return sequences, np.concatenate([np.arange(row.start, row.stop) for row in rows]) + 1


@dataclass(frozen=True)
class KeptTokens:
    """What the rows of a step with drafts keep, on the host: tokens and log-probs of each, as many as were kept."""

    tokens: list[list[int]]
    log_probs: list[list[float]]

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        return self.tokens, self.log_probs


def kept_tokens(rows: Rows[PrefillRow], tokens_T: np.ndarray, log_probs_T: np.ndarray) -> KeptTokens:
    """What the rows keep of the tokens sampled at all positions."""
    sampled, log_probs = tokens_T.tolist(), log_probs_T.tolist()
    kept = KeptTokens([], [])
    first = 0
    for row in rows:
        stop = first + row.stop - row.start
        of_row = sampled[first:stop]
        num_kept = num_agreeing(of_row, row.draft, row.sequence.stop_ids)
        kept.tokens.append(of_row[:num_kept])
        kept.log_probs.append(log_probs[first : first + num_kept])
        first = stop
    return kept


def num_agreeing(sampled: list[int], draft: list[int], stop_ids: frozenset[int]) -> int:
    """How many of the sampled tokens belong to the sequence: those up to the first that differs from its draft or stops it."""
    if sampled[:-1] == draft and stop_ids.isdisjoint(draft):
        return len(sampled)
    pairs = enumerate(zip(sampled, draft), start=1)
    return next(place for place, (token, drafted) in pairs if token != drafted or token in stop_ids)
