"""One decode step that computes draft tokens too: sample the token after each of them, keep those up to the first that differs.

    last token + drafts of each row ─► one forward over the paged cache ─► sample every position ─► compare

Keys and values of drafts that were not kept stay in the cache, behind the sequence's computed tokens: later tokens overwrite them.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch

from lockstep.engines.rollout.embedded.sampler import SampledTokens
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


def kept_tokens(
    rows: Rows[PrefillRow], tokens_T: np.ndarray, log_probs_T: np.ndarray
) -> tuple[SampledTokens, list[int]]:
    """What the rows keep of the tokens sampled at all positions, and how many."""
    longest = max(row.stop - row.start for row in rows)
    tokens_QN = np.full((longest, len(rows)), -1, dtype=tokens_T.dtype)
    log_probs_QN = np.zeros((longest, len(rows)), dtype=np.float32)
    kept = []
    first = 0
    sampled = tokens_T.tolist()
    for column, row in enumerate(rows):
        num_kept = num_agreeing(sampled[first : first + row.stop - row.start], row.draft, row.sequence.stop_ids)
        tokens_QN[:num_kept, column] = tokens_T[first : first + num_kept]
        log_probs_QN[:num_kept, column] = log_probs_T[first : first + num_kept]
        kept.append(num_kept)
        first += row.stop - row.start
    columns = list(range(len(kept)))
    return SampledTokens(torch.from_numpy(tokens_QN), torch.from_numpy(log_probs_QN), columns), kept


def num_agreeing(sampled: Rows[int], draft: Rows[int], stop_ids: frozenset[int]) -> int:
    """How many of the sampled tokens belong to the sequence: those up to the first that differs from its draft or stops it."""
    for place, (token, drafted) in enumerate(zip(sampled, draft), start=1):
        if token != drafted or token in stop_ids:
            return place
    return len(sampled)
