"""How a step's prompts become optimizer steps and micro-batches.

prompts x samples = sequences ─► mini-batches (one optimizer step each) ─► ranks ─► micro-batches (one backward each)
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lengths:
    """Tokens per sequence."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class Work:
    """Sequences that a rank, or the ranks that share its sequences, compute on in one go.

    tokens: packed ones; the prompt of samples that follow each other is counted once.
    targets: tokens of responses, whose logits are computed.
    """

    rows: int
    tokens: int
    targets: int


@dataclass(frozen=True)
class BatchUnits:
    """The units of one model's forward or update.

    ranks:      of the role; `row_ranks` of them have the same rows, of which `sequence_parallel` have different tokens.
    sequences:  of a step, or of one mini-batch for an update.
    per_rank:   the share of one data-parallel rank.
    micro:      its largest micro-batch.
    num_micro:  micro-batches of the share.
    by_tokens:  whether tokens limit a micro-batch, rather than sequences.
    """

    ranks: int
    row_ranks: int
    sequence_parallel: int
    sequences: int
    per_rank: Work
    micro: Work
    num_micro: int
    by_tokens: bool

    @property
    def tokens_per_device(self) -> int:
        """Tokens of the largest micro-batch."""
        return math.ceil(self.micro.tokens / self.sequence_parallel)

    @property
    def targets_per_device(self) -> int:
        return math.ceil(self.micro.targets / self.sequence_parallel)


def work(rows: int, samples: int, lengths: Lengths, packed: bool) -> Work:
    prompts = math.ceil(rows / samples) if packed else rows
    return Work(rows, prompts * lengths.prompt + rows * lengths.response, rows * lengths.response)


def batch_units(
    sequences: int,
    *,
    samples: int,
    lengths: Lengths,
    ranks: int,
    row_ranks: int,
    sequence_parallel: int,
    packed: bool,
    micro_rows: int | None,
    max_tokens: int | None,
    group: int = 1,
) -> BatchUnits:
    """micro_rows, max_tokens: limits of a micro-batch; the latter is one device's, so `sequence_parallel` devices have more.

    group: sequences that stay in one micro-batch.
    """
    rows = math.ceil(sequences / (ranks // row_ranks))
    fitting = min(micro_rows or rows, rows)
    if max_tokens is not None:
        limit = max_tokens * sequence_parallel
        fitting = max(
            1, bisect_right(range(1, rows + 1), limit, key=lambda n: work(n, samples, lengths, packed).tokens)
        )
    fitting = max(group, fitting - fitting % group)
    return BatchUnits(
        ranks,
        row_ranks,
        sequence_parallel,
        sequences,
        work(rows, samples, lengths, packed),
        work(fitting, samples, lengths, packed),
        math.ceil(rows / fitting),
        max_tokens is not None,
    )


def micro_limits(rows: int | None, dynamic: bool | None, max_tokens: int) -> dict[str, Any]:
    """Arguments of `batch_units` for a role's micro-batch keys."""
    return {"micro_rows": None if dynamic else rows, "max_tokens": max_tokens if dynamic else None}


def log_prob_limits(section: Any) -> dict[str, Any]:
    """The same for a pass that computes log-probs. section: of the rollout or the reference."""
    return micro_limits(
        section.log_prob_micro_batch_size_per_gpu,
        section.log_prob_use_dynamic_bsz,
        section.log_prob_max_token_len_per_gpu,
    )
