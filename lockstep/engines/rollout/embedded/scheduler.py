"""Which tokens are computed next. Touches no tensors.

    waiting ──admit──► running ──finish──► gone
       ▲                  │
       └────preempt───────┘   (out of blocks: the youngest gives its blocks back and is computed anew later)

A step computes a prompt or a part of one for some sequences, within a budget of tokens, seats and blocks. Those whose tokens are
computed but for the one drawn last decode: they get windows of several steps of one token each. Equal prompts are computed once:
the first sequence to come computes the prompt, the others wait for it and then share its blocks. Those that get a seat at once draw
their first token from the very same logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lockstep.engines.rollout.embedded.blocks import BlockManager
from lockstep.engines.rollout.embedded.sequence import Sequence


@dataclass(eq=False)
class Row:
    """The tokens start..stop of one sequence, to be computed in this step.

    samplers: sequences that draw their next token from the logits after the last of these tokens.
    """

    sequence: Sequence
    start: int
    stop: int
    samplers: list[Sequence] = field(default_factory=list)


@dataclass
class StepPlan:
    """One forward pass.

    copies: (source, target) blocks to copy before it.
    """

    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.stop - row.start for row in self.rows)


@dataclass
class Window:
    """Several steps of one token for sequences that decode.

    draws:  each sequence with the tokens that it may draw, at most `num_steps`.
    copies: (source, target) blocks to copy before them.
    """

    draws: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return max((count for _, count in self.draws), default=0)

    def shorten(self, num_steps: int) -> None:
        """Take the steps after so many back; their blocks stay with the sequences."""
        for sequence, count in self.draws:
            undone = max(0, count - num_steps)
            sequence.num_computed -= undone
            sequence.num_ahead -= undone
        self.draws = [(sequence, min(count, num_steps)) for sequence, count in self.draws]


@dataclass
class SharedPrompt:
    """A computed prompt that is kept while sequences with the same prompt wait."""

    blocks: list[int]
    num_tokens: int


class Scheduler:
    """Plans step after step until every sequence is finished.

    max_num_seqs:   sequences that run at once.
    max_num_tokens: tokens in one step.
    chunked:        whether a prompt may be split over steps; if not, one above the budget gets a step of its own.
    share_prompts:  whether equal prompts are computed once.

    settle: called before a sequence is preempted; reads what the device has drawn ahead and says whether there was anything.
    """

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int, max_num_tokens: int, chunked: bool, share_prompts: bool
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.chunked = chunked
        self.share_prompts = share_prompts
        self.settle: Callable[[], bool] = lambda: False
        self.running: list[Sequence] = []  # in the order of admission
        self._waiting = WaitingQueue()
        self._prompt_ids: dict[tuple[int, ...], int] = {}
        # By prompt_id: the running sequence that computes the prompt for others; the prompts kept for those that wait;
        # the prompts that the step being planned completes, of which no block can be copied yet.
        self._leaders: dict[int, Sequence] = {}
        self._shared: dict[int, SharedPrompt] = {}
        self._computed_now: set[int] = set()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running) or len(self._waiting) > 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def unfinished(self) -> list[Sequence]:
        return [*self.running, *self._waiting]

    def add(self, sequence: Sequence) -> None:
        if self.share_prompts:
            key = tuple(sequence.request.prompt_ids)
            sequence.prompt_id = self._prompt_ids.setdefault(key, len(self._prompt_ids))
        self._waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.blocks)
        if not self.has_unfinished:
            self._prompt_ids.clear()

    def abort(self) -> None:
        """Forget every sequence."""
        for sequence in self.unfinished():
            self.blocks.release(sequence.blocks)
        self._drop_all_shared()
        self.running.clear()
        self._waiting = WaitingQueue()
        self._leaders.clear()
        self._prompt_ids.clear()

    @property
    def wants_prompts(self) -> bool:
        """Whether a step of prompts is due: one is begun, or enough seats are free that it pays to hold the others up."""
        if not all(s.decodes for s in self.running):
            return True
        free = self.max_num_seqs - len(self.running)
        enough = max(1, self.max_num_seqs // 8)
        return self.num_waiting > 0 and free > 0 and (free >= min(self.num_waiting, enough) or not self.running)

    def plan_window(self, num_steps: int) -> Window:
        """Up to `num_steps` steps for every sequence that decodes, with their blocks."""
        rows = self._undrawn()
        fits = self._num_needed(rows, num_steps) <= self.blocks.num_free
        if not fits and self.settle():
            rows = self._undrawn()
        window = Window()
        for sequence in rows:
            count = min(num_steps, sequence.num_undrawn)
            if not sequence.blocks:  # preempted in this very loop
                continue
            if not fits and not self._make_room(sequence, count):
                break
            start = sequence.num_computed
            window.copies += self.blocks.prepare_write(sequence.blocks, start, start + count)
            sequence.num_computed += count
            sequence.num_ahead += count
            window.draws.append((sequence, count))
        return window

    def _undrawn(self) -> list[Sequence]:
        return [s for s in self.running if s.decodes and s.num_undrawn > 0]

    def _num_needed(self, rows: list[Sequence], num_steps: int) -> int:
        """Blocks that the rows take for so many steps."""
        ends = [(s, s.num_computed + min(num_steps, s.num_undrawn)) for s in rows]
        return sum(self.blocks.num_to_write(s.blocks, s.num_computed, end) for s, end in ends)

    def schedule(self) -> StepPlan:
        """The next step of prompts; it may be empty."""
        plan = StepPlan()
        budget = self.max_num_tokens
        self._computed_now.clear()
        admitted = list(self.running)
        for sequence in admitted:
            if sequence.decodes:
                continue
            length = self._length(sequence, budget, plan)
            if length == 0 or not sequence.blocks:  # no budget, or preempted in this very loop
                continue
            if not self._make_room(sequence, length):
                break
            budget -= length
            self._enter(plan, sequence, length)
        out_of_blocks = len(self.running) < len(admitted)
        for row in list(plan.rows):
            self._fork(row)
        if not out_of_blocks:
            self._admit(plan, budget)
        return plan

    def _length(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """How many tokens of the sequence this step computes."""
        left = len(sequence.tokens) - sequence.num_computed
        if left <= budget or self.chunked:
            return min(left, budget)
        return 0 if plan.rows else left

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Preempt from the youngest on until the sequence can write; False when it had to be preempted itself."""
        start = sequence.num_computed
        while self.blocks.num_to_write(sequence.blocks, start, start + length) > self.blocks.num_free:
            if self._shared:
                self._drop_shared(next(iter(self._shared)))
                continue
            if self.settle():
                if not sequence.blocks:
                    return False  # it has ended meanwhile
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _enter(self, plan: StepPlan, sequence: Sequence, length: int) -> Row:
        start, stop = sequence.num_computed, sequence.num_computed + length
        plan.copies += self.blocks.prepare_write(sequence.blocks, start, stop)
        sequence.num_computed = stop
        row = Row(sequence, start, stop, [sequence] if stop == len(sequence.tokens) else [])
        plan.rows.append(row)
        return row

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Seat those that wait, in order, while there are seats, budget and blocks."""
        if len(self.running) >= self.max_num_seqs:
            return
        for sequence in list(self._waiting):
            if len(self.running) >= self.max_num_seqs or budget <= 0:
                return
            prompt_id = sequence.prompt_id
            if sequence not in self._waiting or prompt_id in self._leaders or prompt_id in self._computed_now:
                continue  # it has just been forked, or its prompt is being computed
            shared = self._shared.get(prompt_id)
            if shared is not None:
                sequence.num_computed = min(shared.num_tokens, len(sequence.tokens) - 1)
                sequence.blocks = self.blocks.share(shared.blocks, sequence.num_computed)
            length = self._length(sequence, budget, plan)
            start = sequence.num_computed
            needed = self.blocks.num_to_write(sequence.blocks, start, start + length)
            if length == 0 or needed + len(self.running) > self.blocks.num_free:  # each that runs may soon need a block
                self.blocks.release(sequence.blocks)
                sequence.num_computed = 0
                if self._shared and not self.running:  # prompts kept for others must not keep everyone out
                    self._drop_all_shared()
                    self._admit(plan, budget)
                return
            self._take_seat(sequence)
            if shared is None and self.share_prompts and sequence.num_generated == 0:
                self._leaders[prompt_id] = sequence
            budget -= length
            self._fork(self._enter(plan, sequence, length))

    def _take_seat(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self.running.append(sequence)
        if sequence.prompt_id in self._shared and not self._waiting.with_prompt(sequence.prompt_id):
            self._drop_shared(sequence.prompt_id)

    def _fork(self, row: Row) -> None:
        """Where the row completes a prompt that others wait for, let them share it."""
        leader = row.sequence
        prompt_id = leader.prompt_id
        if self._leaders.get(prompt_id) is not leader or leader.num_computed < leader.num_prompt:
            return
        del self._leaders[prompt_id]
        self._computed_now.add(prompt_id)
        room = self.blocks.num_free
        for follower in self._waiting.with_prompt(prompt_id):
            if follower.num_generated == 0 and len(self.running) < self.max_num_seqs and room > 0:
                room -= 1  # its next token will need a block
                follower.blocks = self.blocks.share(leader.blocks, leader.num_prompt)
                follower.num_computed = leader.num_prompt
                self._take_seat(follower)
                row.samplers.append(follower)
        if self._waiting.with_prompt(prompt_id):
            blocks = self.blocks.share(leader.blocks, leader.num_prompt)
            self._shared[prompt_id] = SharedPrompt(blocks, leader.num_prompt)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.num_ahead == 0, "preempted while the device draws for it"
        self.running.remove(sequence)
        self.blocks.release(sequence.blocks)
        sequence.num_computed = 0
        sequence.num_preempted += 1
        if self._leaders.get(sequence.prompt_id) is sequence:
            del self._leaders[sequence.prompt_id]
        self._waiting.add_first(sequence)

    def _drop_shared(self, prompt_id: int) -> None:
        shared = self._shared.pop(prompt_id, None)
        if shared is not None:
            self.blocks.release(shared.blocks)

    def _drop_all_shared(self) -> None:
        for prompt_id in list(self._shared):
            self._drop_shared(prompt_id)


class WaitingQueue:
    """Sequences in order, found by prompt too."""

    def __init__(self) -> None:
        self._first: dict[int, Sequence] = {}  # preempted ones; the last entered goes first
        self._rest: dict[int, Sequence] = {}
        self._by_prompt: dict[int, dict[int, Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        self._rest[sequence.index] = sequence
        self._by_prompt.setdefault(sequence.prompt_id, {})[sequence.index] = sequence

    def add_first(self, sequence: Sequence) -> None:
        self._first[sequence.index] = sequence
        self._by_prompt.setdefault(sequence.prompt_id, {})[sequence.index] = sequence

    def remove(self, sequence: Sequence) -> None:
        (self._first if sequence.index in self._first else self._rest).pop(sequence.index)
        same_prompt = self._by_prompt[sequence.prompt_id]
        del same_prompt[sequence.index]
        if not same_prompt:
            del self._by_prompt[sequence.prompt_id]

    def with_prompt(self, prompt_id: int) -> list[Sequence]:
        return list(self._by_prompt.get(prompt_id, {}).values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.index in self._first or sequence.index in self._rest

    def __iter__(self) -> Iterator[Sequence]:
        yield from reversed(self._first.values())
        yield from self._rest.values()

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)
