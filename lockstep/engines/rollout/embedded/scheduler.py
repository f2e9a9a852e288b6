"""Decides which tokens are computed next. Touches no tensors.

          admit                prompt computed            stop token or max_tokens
  waiting ─────► prefilling ──────────────────► decoding ──────────────────────────► finished
     ▲               │                             │
     └── preempted ──┴─────────────────────────────┘

A prefill step computes prompts, or chunks of prompts, within a budget of tokens, sequences and blocks. A decode window runs
several steps of one token for every decoding sequence. If blocks run out, the youngest sequence is preempted: it frees its
blocks and is prefilled again later, with the tokens it has generated.

Waiting sequences start longest first, by the expected length of their answer, so that no long answer is left to decode alone at the
end; first in, first out among equals and if nothing is expected. Samples of a prompt whose blocks are kept for them start before
those of others, and preempted sequences before all. Those that arrive after the first of a round has started belong to the next
round, so no sequence waits forever.

Prompts with equal tokens and equal images are computed once. The first sequence with a prompt (the leader) computes it while the
others wait; then they share its blocks, and those admitted in the same step sample their first token from the same logits.

If the model has states, a running sequence has a slot for its own. A sequence that is admitted in the step that completes its
prompt gets a copy of the leader's state. Later ones compute the prompt again: the leader's state has moved on.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Rows
from dataclasses import dataclass, field
from itertools import islice

from lockstep.engines.rollout.embedded.block_manager import BlockManager
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.protocol.images import content_ids


@dataclass(eq=False, slots=True)
class PrefillRow:
    """Tokens start..stop of one sequence.

    samplers: sequences that sample their next token from the logits of the last of these tokens.
    draft:    tokens after those that the sequence has; the last of start..stop.
    """

    sequence: Sequence
    start: int
    stop: int
    samplers: list[Sequence] = field(default_factory=list)
    draft: Rows[int] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.stop], *self.draft]


@dataclass
class PrefillStep:
    """One forward pass.

    copies:       (source, target) blocks to copy before it.
    state_copies: (source, target) state slots to copy after it.
    is_computed:  whether the forward has run; set by the runner.
    """

    rows: list[PrefillRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    is_computed: bool = False


@dataclass
class DecodeWindow:
    """Several decode steps, with or without draft tokens.

    rows:   each sequence with the most tokens that it samples.
    copies: (source, target) blocks to copy before the first step.
    drafts: draft tokens by the sequence's index, if the host has found them: the window is one step. None in other windows.
    draft_size, draft_steps: tokens per step and steps of a window for which the decoder finds drafts; 0 in other windows.
    is_surveyed: whether a window of plain steps also finds out what drafts would give.
    """

    rows: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    drafts: Mapping[int, list[int]] = field(default_factory=dict)
    draft_size: int = 0
    draft_steps: int = 0
    is_surveyed: bool = False

    @property
    def has_drafts(self) -> bool:
        return bool(self.drafts) or self.draft_size > 0

    @property
    def num_steps(self) -> int:
        return max((count for _, count in self.rows), default=0)

    def truncate(self, num_steps: int) -> None:
        """Undo the steps after `num_steps`; the sequences keep the blocks."""
        self.keep([min(count, num_steps) for _, count in self.rows])

    def keep(self, counts: list[int]) -> None:
        """Undo all but the first tokens of each row; the sequences keep the blocks."""
        for place, ((sequence, count), kept) in enumerate(zip(self.rows, counts, strict=True)):
            if kept < count:
                sequence.num_computed -= count - kept
                sequence.num_unread -= count - kept
                self.rows[place] = sequence, kept


class Scheduler:
    """
    max_num_seqs:   sequences that run at once.
    max_num_tokens: tokens per prefill step.
    chunked:        whether a prompt may be split over steps; if not, a prompt above the budget gets its own step.
    share_prompts:  whether equal prompts are computed once.

    drain: reads all outputs still on the device and returns whether there were any. Called before a sequence is preempted.
    on_release: called before the blocks of a sequence are freed, because it ends or is preempted.
    expected_length: tokens that a waiting sequence is expected to generate; equal for all if nothing is known.
    """

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int, max_num_tokens: int, chunked: bool, share_prompts: bool
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.chunked = chunked
        self.share_prompts = share_prompts
        self.drain: Callable[[], bool] = lambda: False
        self.on_release: Callable[[Sequence], None] = lambda sequence: None
        self.expected_length: Callable[[Sequence], float] = lambda sequence: 0.0
        self.running: list[Sequence] = []  # in order of admission
        self._waiting: dict[int, Sequence] = {}  # by index; preempted ones first, then in order of arrival
        self._round_end = -1  # index of the last sequence of the round
        self._num_waiting: Counter[int] = Counter()  # by prompt_id
        self._prompt_ids: dict[tuple[int, ...], int] = {}
        # By prompt_id: the sequence that computes the prompt; blocks of computed prompts for which others wait;
        # prompts completed by the step being planned, whose blocks cannot be copied yet.
        self._leaders: dict[int, Sequence] = {}
        self._shared: dict[int, list[int]] = {}
        self._completed_now: set[int] = set()

    @property
    def has_states(self) -> bool:
        return self.blocks.num_slots > 0

    @property
    def max_running(self) -> int:
        return min(self.max_num_seqs, self.blocks.num_slots) if self.has_states else self.max_num_seqs

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self._waiting)

    def unfinished(self) -> list[Sequence]:
        return [*self.running, *self._waiting.values()]

    def add(self, sequence: Sequence) -> None:
        if self.share_prompts:
            request = sequence.request
            ids = request.prompt_ids if request.images is None else content_ids(request.prompt_ids, request.images)
            key = tuple(ids)
            sequence.prompt_id = self._prompt_ids.setdefault(key, len(self._prompt_ids))
        self._waiting[sequence.index] = sequence
        self._num_waiting[sequence.prompt_id] += 1

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.on_release(sequence)
        self._free(sequence)
        if not self.has_unfinished:
            self._prompt_ids.clear()

    def drop(self, sequence: Sequence) -> None:
        """End an unfinished sequence, which has no outputs in flight."""
        assert sequence.num_unread == 0, "dropped with outputs in flight"
        if sequence.index in self._waiting:
            self._leave_queue(sequence)  # and stop it at once
        if self._leaders.get(sequence.prompt_id) is sequence:
            del self._leaders[sequence.prompt_id]
        self.finish(sequence)

    def abort(self) -> None:
        """Drop every sequence."""
        for sequence in self.unfinished():
            self._free(sequence)
        self._drop_all_shared()
        for state in (self.running, self._waiting, self._num_waiting, self._leaders, self._prompt_ids):
            state.clear()

    def preempt_above(self, num_running: int) -> None:
        """Preempt the youngest until `num_running` sequences run; none may have outputs in flight."""
        while len(self.running) > num_running:
            self._preempt(self.running[-1])
        if not num_running:
            self._drop_all_shared()

    @property
    def prefill_is_due(self) -> bool:
        """A prefill is in progress, or enough sequences can start to be worth delaying those that decode."""
        if not all(s.is_decoding for s in self.running):
            return True
        can_start = min(len(self._waiting), self.max_running - len(self.running))
        enough = max(1, self.max_running // 8)
        return can_start > 0 and (can_start >= min(len(self._waiting), enough) or not self.running)

    def decodable(self) -> list[Sequence]:
        return [s for s in self.running if s.is_decoding and s.num_left > 0]

    def schedule_drafts(self, sequences: Rows[Sequence], drafts: Mapping[int, list[int]]) -> DecodeWindow | None:
        """One step that computes these draft tokens, too; None if their blocks are not free.

        sequences: the `decodable` ones; nothing is in flight. drafts: by the sequence's index.
        """
        rows = [(s, 1 + len(drafts.get(s.index, ()))) for s in sequences]
        return self._window(rows, drafts, fits=True) if self._fits(rows) else None

    def schedule_draft_steps(self, num_steps: int, size: int, max_draft: int) -> DecodeWindow | None:
        """Steps of `size` tokens for every decoding sequence, drafts among them; None if the most tokens that they may give, for
        which blocks are allocated, do not fit. max_draft: most draft tokens of a sequence per step, which it may get once others
        have ended."""
        rows = self._decodable(num_steps * (1 + max_draft))
        if not 0 < len(rows) < size or not self._fits(rows):
            return None
        window = self._window(rows, {}, fits=True)
        window.draft_size, window.draft_steps = size, num_steps
        return window

    def schedule_decode(self, num_steps: int) -> DecodeWindow:
        """Up to `num_steps` steps for every decoding sequence, with their blocks allocated."""
        rows = self._decodable(num_steps)
        fits = self._fits(rows)
        if not fits and self.drain():
            rows = self._decodable(num_steps)  # draining may finish sequences
        return self._window(rows, {}, fits)

    def _fits(self, rows: list[tuple[Sequence, int]]) -> bool:
        """Whether the next tokens of all of them fit without freeing any block."""
        # a row's tokens lie in one more block than as many tokens can fill, or fewer
        most_needed = sum(count for _, count in rows) // self.blocks.block_size + 2 * len(rows)
        if most_needed <= self.blocks.num_free:
            return True
        return sum(self._num_needed(s, count) for s, count in rows) <= self.blocks.num_free

    def _window(self, rows: list[tuple[Sequence, int]], drafts: Mapping[int, list[int]], fits: bool) -> DecodeWindow:
        window = DecodeWindow(drafts=drafts)
        for sequence, count in rows:
            if not fits and (not sequence.blocks or not self._make_room(sequence, count)):
                break  # preempted, like all that follow
            start = sequence.num_computed
            window.copies += self.blocks.allocate(sequence.blocks, start, start + count)
            sequence.num_computed += count
            sequence.num_unread += count
            window.rows.append((sequence, count))
        return window

    def schedule_prefill(self) -> PrefillStep:
        """The next prefill step; empty if nothing fits."""
        step = PrefillStep()
        budget = self.max_num_tokens
        self._completed_now.clear()
        running = list(self.running)
        for sequence in running:
            length = 0 if sequence.is_decoding else self._chunk_length(sequence, budget, step)
            if length == 0 or not sequence.blocks:  # no budget, or preempted in this loop
                continue
            if not self._make_room(sequence, length):
                break
            budget -= length
            self._add_row(step, sequence, length)
        for row in list(step.rows):
            self._share_prompt(step, row)
        if len(self.running) >= len(running):  # nothing was preempted
            self._admit(step, budget)
        return step

    def undo_prefill(self, step: PrefillStep) -> None:
        """Take back a step that was not computed: its sequences wait again."""
        for prompt_id in self._completed_now:
            self._drop_shared(prompt_id)
        indices = {s.index for row in step.rows for s in (row.sequence, *row.samplers)}
        for sequence in [s for s in reversed(self.running) if s.index in indices]:
            sequence.num_computed = 0
            self._preempt(sequence)

    def _decodable(self, num_steps: int) -> list[tuple[Sequence, int]]:
        return [(s, min(num_steps, s.num_left)) for s in self.decodable()]

    def _num_needed(self, sequence: Sequence, count: int) -> int:
        start = sequence.num_computed
        return self.blocks.num_needed(sequence.blocks, start, start + count)

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Free blocks until `count` more tokens of the sequence fit; False if it was preempted itself."""
        while self._num_needed(sequence, count) > self.blocks.num_free:
            if self._shared:
                self._drop_shared(next(iter(self._shared)))
            elif not self.drain():
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    return False
        return True

    def _chunk_length(self, sequence: Sequence, budget: int, step: PrefillStep) -> int:
        """Tokens of the sequence to compute in this step."""
        left = len(sequence.tokens) - sequence.num_computed
        if left <= budget or self.chunked:
            return min(left, budget)
        return 0 if step.rows else left

    def _add_row(self, step: PrefillStep, sequence: Sequence, length: int) -> PrefillRow:
        start, stop = sequence.num_computed, sequence.num_computed + length
        step.copies += self.blocks.allocate(sequence.blocks, start, stop)
        sequence.num_computed = stop
        row = PrefillRow(sequence, start, stop, [sequence] if stop == len(sequence.tokens) else [])
        step.rows.append(row)
        return row

    def _admit(self, step: PrefillStep, budget: int) -> None:
        """Start waiting sequences in order, within the limits on sequences, tokens and blocks."""
        if len(self.running) >= self.max_running or budget <= 0:
            return
        for sequence in self._longest_first():
            if len(self.running) >= self.max_running or budget <= 0:
                return
            prompt_id = sequence.prompt_id
            if sequence.index not in self._waiting or prompt_id in self._leaders or prompt_id in self._completed_now:
                continue  # already started by `_share_prompt`, or its prompt is being computed
            shared = self._shared.get(prompt_id)
            if shared is not None:
                sequence.num_computed = min(sequence.num_prompt, len(sequence.tokens) - 1)
                sequence.blocks = self.blocks.share(shared, sequence.num_computed)
            length = self._chunk_length(sequence, budget, step)
            # every running sequence may soon need a block
            if length == 0 or self._num_needed(sequence, length) + len(self.running) > self.blocks.num_free:
                self.blocks.free(sequence.blocks)
                sequence.num_computed = 0
                if self._shared and not self.running:  # shared prompts hold the blocks that everyone waits for
                    self._drop_all_shared()
                    self._admit(step, budget)
                return
            self._start(sequence)
            if shared is None and self.share_prompts and sequence.num_generated == 0:
                self._leaders[prompt_id] = sequence
            budget -= length
            self._share_prompt(step, self._add_row(step, sequence, length))

    def _longest_first(self) -> list[Sequence]:
        """The waiting sequences in the order in which they start."""
        waiting = list(self._waiting.values())
        if all(s.index > self._round_end for s in waiting):
            self._round_end = max((s.index for s in waiting), default=-1)

        def place(s: Sequence) -> tuple[bool, bool, bool, float]:
            is_computed = s.prompt_id in self._shared  # its blocks are kept until its last sample starts
            return s.num_preempted == 0, s.index > self._round_end, not is_computed, -self.expected_length(s)

        return sorted(waiting, key=place)

    def _start(self, sequence: Sequence) -> None:
        self._leave_queue(sequence)
        if self.has_states:
            sequence.state_slot = self.blocks.take_slot()

    def _leave_queue(self, sequence: Sequence) -> None:
        del self._waiting[sequence.index]
        self._num_waiting[sequence.prompt_id] -= 1
        self.running.append(sequence)
        if not self._num_waiting[sequence.prompt_id]:
            self._drop_shared(sequence.prompt_id)

    def _share_prompt(self, step: PrefillStep, row: PrefillRow) -> None:
        """If the row completes a prompt for which others wait, start those that fit and keep its blocks for the rest.

        With states the rest compute it again.
        """
        leader = row.sequence
        prompt_id = row.sequence.prompt_id
        if self._leaders.get(prompt_id) is not leader or leader.num_computed < leader.num_prompt:
            return
        del self._leaders[prompt_id]
        self._completed_now.add(prompt_id)
        room = self.blocks.num_free
        same_prompt = (s for s in self._waiting.values() if s.prompt_id == prompt_id)
        for follower in list(islice(same_prompt, self._num_waiting[prompt_id])):
            if follower.num_generated == 0 and len(self.running) < self.max_running and room > 0:
                room -= 1  # its next token will need a block
                follower.blocks = self.blocks.share(leader.blocks, leader.num_prompt)
                follower.num_computed = leader.num_prompt
                self._start(follower)
                row.samplers.append(follower)
                if leader.state_slot is not None and follower.state_slot is not None:
                    step.state_copies.append((leader.state_slot, follower.state_slot))
        if self._num_waiting[prompt_id] and not self.has_states:
            self._shared[prompt_id] = self.blocks.share(leader.blocks, leader.num_prompt)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.num_unread == 0, "preempted with outputs in flight"
        self.running.remove(sequence)
        self.on_release(sequence)
        self._free(sequence)
        sequence.num_computed = 0
        sequence.num_preempted += 1
        if self._leaders.get(sequence.prompt_id) is sequence:
            del self._leaders[sequence.prompt_id]
        self._waiting = {sequence.index: sequence, **self._waiting}
        self._num_waiting[sequence.prompt_id] += 1

    def _free(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.blocks)
        if sequence.state_slot is not None:
            self.blocks.free_slot(sequence.state_slot)
            sequence.state_slot = None

    def _drop_shared(self, prompt_id: int) -> None:
        self.blocks.free(self._shared.pop(prompt_id, []))

    def _drop_all_shared(self) -> None:
        for prompt_id in list(self._shared):
            self._drop_shared(prompt_id)
