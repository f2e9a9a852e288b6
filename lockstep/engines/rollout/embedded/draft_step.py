"""One decode step that computes draft tokens too: sample the token after each of them, keep those up to the first that differs.

    last token + drafts of each row ─► one forward over the paged cache ─► sample every position ─► compare

Keys and values of drafts that were not kept stay in the cache, behind the sequence's computed tokens: later tokens overwrite them.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from lockstep.engines.rollout.embedded.scheduler import DecodeWindow, PrefillRow
from lockstep.engines.rollout.embedded.sequence import Sequence

_NO_SAMPLERS: list[Sequence] = []  # these rows sample at every token


def draft_rows(window: DecodeWindow) -> list[PrefillRow]:
    """The last token and the drafts of each sequence."""
    drafts = window.drafts
    rows = []
    for sequence, count in window.rows:
        start = len(sequence.tokens) - 1
        rows.append(PrefillRow(sequence, start, start + count, _NO_SAMPLERS, drafts.get(sequence.index, ())))
    return rows


def sampled_positions(rows: Rows[PrefillRow]) -> tuple[list[Sequence], np.ndarray]:
    """The sequence and the position of each token that the rows sample."""
    sequences = [row.sequence for row in rows for _ in range(row.start, row.stop)]
    return sequences, np.concatenate([np.arange(row.start, row.stop) for row in rows]) + 1


@dataclass(frozen=True)
class KeptTokens:
    """What the rows of a step with drafts keep, on the host: tokens and log-probs of each, as many as were kept."""

    tokens: list[list[int]]
    log_probs: list[list[float]]
    curve: None = None
    counts: None = None

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        return self.tokens, self.log_probs


def kept_tokens(rows: Rows[PrefillRow], tokens_T: np.ndarray, log_probs_T: np.ndarray) -> KeptTokens:
    """What the rows keep of the tokens sampled at all positions."""
    sampled, log_probs = tokens_T.tolist(), log_probs_T.tolist()
    kept = KeptTokens([], [])
    first = 0
    for row in rows:
        of_row = sampled[first : first + len(row.draft) + 1]
        num_kept = num_agreeing(of_row, row.draft, row.sequence.stop_ids)
        kept.log_probs.append(log_probs[first : first + num_kept])
        first += len(of_row)
        del of_row[num_kept:]
        kept.tokens.append(of_row)
    return kept


def num_agreeing(sampled: list[int], draft: Rows[int], stop_ids: frozenset[int]) -> int:
    """How many of the sampled tokens belong to the sequence: those up to the first that differs from its draft or stops it."""
    if sampled[:-1] == draft and stop_ids.isdisjoint(draft):
        return len(sampled)
    num_kept = 1
    for token, drafted in zip(sampled, draft):
        if token != drafted or token in stop_ids:
            break
        num_kept += 1
    return num_kept
