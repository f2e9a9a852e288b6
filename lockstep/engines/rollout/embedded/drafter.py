"""Draft tokens of decoding sequences, from the answers that were seen for their prompts.

    CPU:  history (answers by prompt) + controller (what pays) ─► drafts of one step ─► what was accepted ─► controller
    CUDA: controller ─► steps of a size, whose drafts the device finds ─► what was accepted and is expected ─► controller

A sampled token depends only on its logits, seed and position. So a step computes the logits after the last token and after each
draft token, samples all of these positions, and keeps the tokens up to the first that differs from its draft: those are the
tokens that plain steps would have sampled.
"""

import logging
from collections.abc import Mapping, Sequence as Rows
from dataclasses import dataclass, field

from lockstep.config.actor_rollout_ref import HistoryDraftsConfig
from lockstep.engines.rollout.embedded.draft_controller import (
    PROBE_ROWS,
    PROBE_TOKENS,
    Acceptance,
    DraftController,
    graph_sizes,
)
from lockstep.engines.rollout.embedded.history import AnswerHistory, Trail
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.kernels.draft_settings import ROW_DECAY

logger = logging.getLogger(__name__)


@dataclass
class DraftTotals:
    """Sums over steps.

    num_steps, num_rows, num_sampled: of the steps with drafts: their number, rows, and tokens that they gave.
    num_drafted, num_accepted:        draft tokens that were computed, and those that were kept.
    num_generated:                    tokens of the sequences that have ended.
    saved_s:                          estimated seconds that the drafts saved.
    """

    num_steps: int = 0
    num_rows: int = 0
    num_sampled: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_generated: int = 0
    saved_s: float = 0.0


@dataclass(frozen=True)
class DraftCounts:
    """Of some steps: rows that had not ended, the tokens that they gave, draft tokens, and rows whose drafts were not all right."""

    num_rows: int
    num_sampled: int
    num_drafted: int
    num_failed: int


@dataclass(slots=True)
class _Tracked:
    """A sequence that is followed; on CUDA only its answer matters, once it has ended."""

    sequence: Sequence
    key: bytes
    num_prompt: int
    acceptance: Acceptance = field(default_factory=Acceptance)
    trail: Trail = field(default_factory=Trail)


class Drafter:
    """max_num_seqs: sequences that run at once."""

    def __init__(self, config: HistoryDraftsConfig, max_num_seqs: int) -> None:
        self.history = AnswerHistory(config.max_memory_mb << 20)
        most_on_cpu = config.step_tokens(max_num_seqs, on_cuda=False)
        self.controller = DraftController(config.max_draft_tokens, range(1, most_on_cpu + 1))
        self._cuda_sizes = graph_sizes(config.step_tokens(max_num_seqs, on_cuda=True))
        self.totals = DraftTotals()
        self._tracked: dict[int, _Tracked] = {}  # by the sequence's index

    def follow(self, sequence: Sequence) -> None:
        """A new sequence."""
        key = sequence.prompt_key
        self._tracked[sequence.index] = _Tracked(sequence, key, sequence.num_prompt)
        self.history.follow(key, sequence.index, sequence.tokens, sequence.num_prompt)

    def end(self, sequence: Sequence) -> None:
        """A sequence that has finished or was aborted."""
        tracked = self._tracked.pop(sequence.index, None)
        if tracked is not None:
            self.history.unfollow(tracked.key, sequence.index)
            self.totals.num_generated += sequence.num_generated
            if sequence.num_generated:
                self.history.add(tracked.key, sequence.tokens[sequence.num_prompt :])

    def begin_serving(self) -> None:
        if not self.totals.num_generated:
            self.totals = DraftTotals()  # without those of the model's comparison with transformers
        self.controller.begin()

    def end_serving(self) -> None:
        self._tracked.clear()
        self.history.end_step()
        if self.controller.is_useless():
            self.history.clear()

    def use_cuda(self) -> None:
        """Steps are CUDA graphs, of few sizes."""
        self.controller.use_sizes(self._cuda_sizes)

    def lower_tokens(self, num_tokens: int, reason: str) -> None:
        """Halve the tokens of a step with drafts that has failed."""
        self.controller.lower_tokens(num_tokens // 2)
        logger.warning(
            "out of memory for a decode step of %d tokens with drafts (%s): such steps have at most %d tokens from now on; lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            *(num_tokens, reason, self.controller.max_tokens),
        )

    def is_due(self, sequences: Rows[Sequence]) -> bool:
        """Whether drafts of these sequences are worth looking for."""
        controller, num_rows = self.controller, len(sequences)
        is_probe = controller.is_probe(num_rows)
        if not is_probe and not controller.is_open(num_rows):
            return False
        if controller.has_paid:
            return num_rows > 0
        tracked = (self._tracked.get(s.index) for s in sequences)
        rows = [t.acceptance for t in tracked if t is not None and self.history.has_answers(t.key, t.sequence.index)]
        return bool(rows) and (is_probe or controller.may_pay(rows, num_rows))

    def drafts(self, sequences: Rows[Sequence]) -> dict[int, list[int]]:
        """Draft tokens by the sequence's index; of sequences without unread tokens. Empty if none pay."""
        controller = self.controller
        is_probe = controller.is_probe(len(sequences))
        tracked = [t for s in sequences if (t := self._tracked.get(s.index)) is not None]
        found = [self._find(t) for t in (tracked[:PROBE_ROWS] if is_probe else tracked)]
        available = [len(draft) for draft in found]
        if is_probe:
            chosen = [min(PROBE_TOKENS, length) for length in available]
        else:
            chosen = controller.lengths([t.acceptance for t in tracked], available)
        num_with_draft = len(available) - available.count(0)
        controller.note_search(len(found), num_with_draft, pays=any(chosen), is_probe=is_probe)
        return {t.sequence.index: draft[:n] for t, draft, n in zip(tracked, found, chosen) if n}

    def note_steps(self, size: int, num_steps: int, num_rows: int, counts: DraftCounts, seconds: float | None) -> None:
        """Steps of `size` tokens with drafts that the decoder found, for at most `num_rows` rows."""
        if not counts.num_rows:  # they had all ended
            return
        self.controller.note_step(size, None if seconds is None else seconds / num_steps)
        num_accepted = counts.num_sampled - counts.num_rows
        self.controller.note_expected(counts.num_rows, num_accepted)
        self.controller.note_accepted(counts.num_rows, num_accepted, counts.num_failed)
        self._count(num_steps, counts)
        if seconds is not None:
            self.totals.saved_s += self.controller.saved_seconds(num_rows, counts.num_sampled, seconds)

    def note_step(
        self, rows: Rows[tuple[Sequence, int]], drafts: Mapping[int, list[int]], seconds: float | None
    ) -> None:
        """A step with drafts. rows: each sequence with its number of new tokens, one more than its accepted drafts.
        seconds: None if they say nothing about other steps."""
        num_drafted = num_failed = 0
        for sequence, num_new in rows:
            draft = drafts.get(sequence.index)
            if draft is None:
                continue
            has_failed = num_new <= len(draft)
            num_drafted += len(draft)
            num_failed += has_failed
            tracked = self._tracked.get(sequence.index)
            if tracked is not None:
                tracked.acceptance.add(num_new - 1, has_failed, ROW_DECAY)
        num_rows, num_sampled = len(rows), sum(num_new for _, num_new in rows)
        controller = self.controller
        controller.note_step(num_rows + num_drafted, seconds)
        controller.note_accepted(len(drafts), num_sampled - num_rows, num_failed)
        self._count(1, DraftCounts(num_rows, num_sampled, num_drafted, num_failed))
        if seconds is not None:
            self.totals.saved_s += controller.saved_seconds(num_rows, num_sampled, seconds)

    def note_capture(self, seconds: float, has_drafts: bool) -> None:
        """What `Decoder.prepare` took for a window, with drafts or without, whose step takes longer than later ones."""
        self.controller.note_capture(seconds)
        if has_drafts:
            self.totals.saved_s -= seconds

    def forget_graphs(self) -> None:
        """The graphs of steps with drafts are gone."""
        self.controller.forget_graphs()

    def take_index_seconds(self) -> float:
        """Seconds of building indices since the last call. They are a loss, but no part of the cost of a step."""
        seconds, self.history.index_s = self.history.index_s, 0.0
        self.totals.saved_s -= seconds
        return seconds

    def note_window(self, num_rows: int, num_steps: int, seconds: float) -> None:
        """A window of plain steps."""
        self.controller.measure_plain(num_rows, seconds / num_steps)

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call; empty if nothing was generated."""
        totals, self.totals = self.totals, DraftTotals()
        if not totals.num_generated:
            return {}
        metrics = {
            "perf/drafts/share": totals.num_accepted / totals.num_generated,
            "perf/drafts/saved_s": totals.saved_s,
            "perf/drafts/history_mb": self.history.num_bytes / 2**20,
        }
        if totals.num_drafted:
            metrics["perf/drafts/acceptance"] = totals.num_accepted / totals.num_drafted
        if totals.num_rows:
            metrics["perf/drafts/tokens_per_step"] = totals.num_sampled / totals.num_rows
        return metrics

    def _count(self, num_steps: int, counts: DraftCounts) -> None:
        totals = self.totals
        totals.num_steps += num_steps
        totals.num_rows += counts.num_rows
        totals.num_sampled += counts.num_sampled
        totals.num_drafted += counts.num_drafted
        totals.num_accepted += counts.num_sampled - counts.num_rows

    def _find(self, tracked: _Tracked) -> list[int]:
        sequence = tracked.sequence
        most = min(self.controller.max_draft_tokens, sequence.num_left - 1)  # one more token is sampled
        return self.history.draft(tracked.key, sequence.tokens, most, tracked.num_prompt, tracked.trail)
