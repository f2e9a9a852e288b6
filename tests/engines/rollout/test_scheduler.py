"""Which tokens are scheduled when; no model."""

from hypothesis import given, settings, strategies as st

from lockstep.engines.rollout.embedded.block_manager import BlockManager
from lockstep.engines.rollout.embedded.scheduler import DecodeWindow, PrefillRow, PrefillStep, Scheduler
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.engines.rollout.rollout_engine import GenerationRequest, SamplingParams


def make(
    num_blocks: int = 64,
    seqs: int = 8,
    tokens: int = 32,
    chunked: bool = True,
    share_prompts: bool = True,
    num_slots: int = 0,
) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, 4, num_slots), seqs, tokens, chunked, share_prompts)


def sequence(index: int, prompt: list[int], max_tokens: int = 4) -> Sequence:
    return Sequence(index, index, GenerationRequest(prompt, SamplingParams(max_tokens=max_tokens)), frozenset(), 0)


def step(scheduler: Scheduler) -> PrefillStep:
    """A prefill step or, if none is possible, a decode step. Every sampled token is 9."""
    plan = scheduler.schedule_prefill() if scheduler.prefill_is_due else PrefillStep()
    if not plan.rows:
        window = scheduler.schedule_decode(1)
        for s, _ in window.rows:
            s.num_unread -= 1
        plan = PrefillStep(
            [PrefillRow(s, s.num_computed - 1, s.num_computed, [s]) for s, _ in window.rows], window.copies
        )
    assert plan.rows, "nothing can be scheduled"
    for s in [s for row in plan.rows for s in row.samplers]:
        s.append([9], [0.0])
        if s.stop_reason is not None:
            scheduler.finish(s)
    return plan


def computed(plan: PrefillStep) -> list[tuple[int, int, int]]:
    return [(row.sequence.index, row.start, row.stop) for row in plan.rows]


def test_prefill_then_decode() -> None:
    scheduler = make()
    scheduler.add(sequence(0, [1, 2, 3]))
    scheduler.add(sequence(1, [4, 5], max_tokens=2))
    assert computed(step(scheduler)) == [(0, 0, 3), (1, 0, 2)]
    assert computed(step(scheduler)) == [(0, 3, 4), (1, 2, 3)]
    assert computed(step(scheduler)) == [(0, 4, 5)]  # the other is finished
    step(scheduler)
    assert not scheduler.has_unfinished and scheduler.blocks.num_free == 64


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    scheduler = make(tokens=8)
    scheduler.add(sequence(0, [1, 2, 3]))
    scheduler.add(sequence(1, list(range(20))))
    assert computed(step(scheduler)) == [(0, 0, 3), (1, 0, 5)]
    plan = step(scheduler)
    assert computed(plan) == [(1, 5, 13)] and not plan.rows[0].samplers
    plan = step(scheduler)
    assert computed(plan) == [(1, 13, 20)] and len(plan.rows[0].samplers) == 1
    assert computed(step(scheduler)) == [(0, 3, 4), (1, 20, 21)]


def test_without_chunking_a_long_prompt_gets_its_own_step() -> None:
    scheduler = make(tokens=8, chunked=False)
    scheduler.add(sequence(0, [1, 2, 3], max_tokens=2))
    scheduler.add(sequence(1, list(range(20))))
    assert computed(step(scheduler)) == [(0, 0, 3)]
    assert computed(step(scheduler)) == [(1, 0, 20)]
    assert computed(step(scheduler)) == [(0, 3, 4), (1, 20, 21)]


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make(seqs=2)
    for i in range(5):
        scheduler.add(sequence(i, [i, i]))
    while scheduler.has_unfinished:
        assert len(step(scheduler).rows) <= 2


def test_samples_of_one_prompt_share_one_row() -> None:
    scheduler = make()
    prompt = [1, 2, 3, 4, 5, 6]
    for i in range(3):
        scheduler.add(sequence(i, prompt))
    plan = step(scheduler)
    assert computed(plan) == [(0, 0, 6)]
    assert [s.index for s in plan.rows[0].samplers] == [0, 1, 2]
    plan = step(scheduler)
    assert computed(plan) == [(0, 6, 7), (1, 6, 7), (2, 6, 7)]
    assert len(plan.copies) == 2  # the last sequence keeps the shared block
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.blocks.num_free == 64


def test_a_sample_without_a_free_slot_uses_the_shared_prompt_later() -> None:
    scheduler = make(seqs=1)
    prompt = [1, 2, 3, 4, 5, 6]
    for i in range(3):
        scheduler.add(sequence(i, prompt, max_tokens=2))
    plans = []
    while scheduler.has_unfinished:
        plans.append(computed(step(scheduler)))
    assert plans == [[(0, 0, 6)], [(0, 6, 7)], [(1, 5, 6)], [(1, 6, 7)], [(2, 5, 6)], [(2, 6, 7)]]
    assert scheduler.blocks.num_free == 64


def test_samples_of_one_prompt_stay_together_when_the_expected_lengths_change() -> None:
    """The first samples are shorter than expected: those of other prompts seem longer from then on."""
    scheduler = make(seqs=2)
    expected = {1: 10.0, 2: 9.0, 3: 8.0}
    scheduler.expected_length = lambda s: expected[s.request.prompt_ids[0]]
    for i, first in enumerate([1, 2, 3] * 4):
        scheduler.add(sequence(i, [first, *range(10, 17)], max_tokens=2))
    started: list[int] = []
    num_computed = 0
    while scheduler.has_unfinished:
        plan = step(scheduler)
        for s in {s for row in plan.rows for s in row.samplers if s.num_generated == 1}:
            started.append(s.request.prompt_ids[0])
            expected[started[-1]] = 1.0
        num_computed += sum(row.start == 0 for row in plan.rows)
        assert len(scheduler._shared) <= 1
    assert started == [1] * 4 + [2] * 4 + [3] * 4 and num_computed == 3


def test_samples_of_one_prompt_get_a_copy_of_its_state() -> None:
    scheduler = make(num_slots=8)
    for i in range(3):
        scheduler.add(sequence(i, [1, 2, 3, 4, 5, 6], max_tokens=2))
    plan = step(scheduler)
    slots = [s.state_slot for s in scheduler.running]
    assert computed(plan) == [(0, 0, 6)] and len(set(slots)) == 3
    assert plan.state_copies == [(slots[0], slots[1]), (slots[0], slots[2])]
    assert not step(scheduler).state_copies
    assert not scheduler.has_unfinished and scheduler.blocks.num_free_slots == 8


def test_a_sample_without_a_free_state_slot_computes_the_prompt_again() -> None:
    scheduler = make(num_slots=1)
    for i in range(3):
        scheduler.add(sequence(i, [1, 2, 3, 4, 5, 6], max_tokens=2))
    plans = []
    while scheduler.has_unfinished:
        assert len(scheduler.running) <= 1
        plans.append(computed(step(scheduler)))
    assert plans == [[(0, 0, 6)], [(0, 6, 7)], [(1, 0, 6)], [(1, 6, 7)], [(2, 0, 6)], [(2, 6, 7)]]
    assert scheduler.blocks.num_free == 64 and scheduler.blocks.num_free_slots == 1


def test_every_end_frees_the_state_slot() -> None:
    scheduler = make(num_slots=2, share_prompts=False)
    sequences = [sequence(i, [1, 2, 3, i]) for i in range(4)]
    for s in sequences:
        scheduler.add(s)
    step(scheduler)
    assert scheduler.blocks.num_free_slots == 0
    scheduler.drop(sequences[3])  # waits: it has none
    scheduler.preempt_above(1)
    assert sequences[1].state_slot is None and sequences[1].num_computed == 0 and scheduler.blocks.num_free_slots == 1
    scheduler.drop(sequences[0])
    assert scheduler.blocks.num_free_slots == 2
    plan = step(scheduler)
    assert computed(plan) == [(1, 0, 5), (2, 0, 4)]
    scheduler.undo_prefill(plan)
    assert scheduler.blocks.num_free_slots == 2
    step(scheduler)
    scheduler.abort()
    assert scheduler.blocks.num_free_slots == 2


def test_the_youngest_is_preempted_and_resumes() -> None:
    scheduler = make(num_blocks=5, share_prompts=False)
    old, young = sequence(0, [1, 2, 3, 4], max_tokens=12), sequence(1, [5, 6, 7], max_tokens=12)
    scheduler.add(old)
    scheduler.add(young)
    while scheduler.has_unfinished:
        step(scheduler)
    assert old.num_preempted == 0 and young.num_preempted > 0
    assert old.tokens == [1, 2, 3, 4] + [9] * 12 and young.tokens == [5, 6, 7] + [9] * 12
    assert scheduler.blocks.num_free == 5


def test_shared_prompts_are_dropped_when_blocks_run_out() -> None:
    scheduler = make(num_blocks=6, seqs=2)
    prompt, other = list(range(8)), list(range(10, 18))
    for i, p in enumerate([prompt, other, prompt, other]):
        scheduler.add(sequence(i, p, max_tokens=9))
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.blocks.num_free == 6


def test_abort_frees_all_blocks() -> None:
    scheduler = make(seqs=2)
    for i in range(4):
        scheduler.add(sequence(i, [1, 2, 3, 4, 5]))
    step(scheduler)
    scheduler.abort()
    assert not scheduler.has_unfinished and scheduler.blocks.num_free == 64


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_row_finds_its_own_tokens_in_its_blocks(data: st.DataObject) -> None:
    """Run random schedules on a cache of token ids: block copies, then writes, then check what each sequence reads.

    With state slots, a state is the list of tokens that it has seen; a freed slot keeps its content.
    """
    size = data.draw(st.integers(1, 5), label="block size")
    lengths = st.integers(1, 9)
    prompts = [
        [100 * i + n for n in range(data.draw(lengths))] for i in range(data.draw(st.integers(1, 4), label="prompts"))
    ]
    sequences = [
        sequence(i, data.draw(st.sampled_from(prompts)), data.draw(lengths))
        for i in range(data.draw(st.integers(1, 10)))
    ]
    longest = max(-(-s.max_cached // size) for s in sequences)
    num_blocks = longest + data.draw(st.integers(0, 8), label="spare blocks")
    num_slots = data.draw(st.integers(0, 6), label="state slots")
    scheduler = Scheduler(
        BlockManager(num_blocks, size, num_slots),
        max_num_seqs=data.draw(st.integers(1, 6), label="max_num_seqs"),
        max_num_tokens=data.draw(st.integers(1, 12), label="budget"),
        chunked=data.draw(st.booleans(), label="chunked"),
        share_prompts=data.draw(st.booleans(), label="share"),
    )
    expected = {s.index: data.draw(st.integers(1, 9), label="expected") for s in sequences}
    scheduler.expected_length = lambda s: expected[s.index]
    late = data.draw(st.integers(0, len(sequences)), label="late arrivals")
    for s in sequences[late:]:
        scheduler.add(s)
    memory: dict[tuple[int, int], int] = {}
    states: dict[int | None, list[int]] = {}
    for num_steps in range(2000):
        if num_steps == 3:
            for s in sequences[:late]:
                scheduler.add(s)
        if not scheduler.has_unfinished:
            if num_steps > 3:
                break
            continue
        plan = scheduler.schedule_prefill() if scheduler.prefill_is_due else PrefillStep()
        window = DecodeWindow() if plan.rows else scheduler.schedule_decode(data.draw(st.integers(1, 4), label="steps"))
        assert plan.rows or window.rows, "nothing can be scheduled"
        before = dict(memory)
        for source, target in plan.copies + window.copies:
            for offset in range(size):
                memory[target, offset] = before.get((source, offset), -1)
        for row in plan.rows:
            for p in range(row.start, row.stop):
                memory[row.sequence.blocks[p // size], p % size] = row.sequence.tokens[p]
            before_row = states[row.sequence.state_slot] if row.start else []
            states[row.sequence.state_slot] = before_row + row.sequence.tokens[row.start : row.stop]
        for state_source, state_target in plan.state_copies:
            states[state_target] = states[state_source]
        for row in plan.rows:
            for s in row.samplers:
                assert s.num_computed == len(s.tokens)
                s.append([1000 * s.index + len(s.tokens)], [0.0])
        if window.rows:
            window.truncate(data.draw(st.integers(1, window.num_steps), label="steps done"))
        for s, count in window.rows:
            s.num_unread -= count
            for _ in range(count):
                p = len(s.tokens) - 1
                memory[s.blocks[p // size], p % size] = s.tokens[p]
                if num_slots:
                    states[s.state_slot] = [*states[s.state_slot], s.tokens[p]]
                s.append([1000 * s.index + len(s.tokens)], [0.0])
            assert s.num_computed == len(s.tokens) - 1
        if num_slots:
            slots = [s.state_slot for s in scheduler.running]
            assert None not in slots and len(set(slots)) == len(slots) == num_slots - scheduler.blocks.num_free_slots
            for s in scheduler.running:
                assert states[s.state_slot] == s.tokens[: s.num_computed]
        for s in list(scheduler.running):
            seen = [memory[s.blocks[p // size], p % size] for p in range(s.num_computed)]
            assert seen == s.tokens[: s.num_computed]
            if s.stop_reason is not None:
                scheduler.finish(s)
    assert not scheduler.has_unfinished, "the schedule does not terminate"
    assert all(s.num_generated == s.request.sampling.max_tokens for s in sequences)
    assert scheduler.blocks.num_free == num_blocks and scheduler.blocks.num_free_slots == num_slots


def read(scheduler: Scheduler, rows: list[tuple[Sequence, int]], num_sampled: int) -> None:
    """Read a launch in which each sequence sampled `num_sampled` tokens; fewer than scheduled: it met a stop token."""
    for s, count in rows:
        s.num_unread -= count
        s.append([9] * min(num_sampled, count), [0.0] * min(num_sampled, count))
        if num_sampled < count:
            s.stop_reason = "stop"
        if s.stop_reason is not None:
            scheduler.finish(s)


def launch_prefill(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    plan = scheduler.schedule_prefill()
    rows = [(s, 1) for row in plan.rows for s in row.samplers]
    for s, _ in rows:
        s.num_unread += 1
    return rows


def test_windows_are_scheduled_before_outputs_are_read() -> None:
    scheduler = make()
    long, short = sequence(0, [1, 2, 3], max_tokens=20), sequence(1, [4, 5], max_tokens=6)
    scheduler.add(long)
    scheduler.add(short)
    assert scheduler.prefill_is_due
    prefill = launch_prefill(scheduler)
    assert not scheduler.prefill_is_due and long.is_decoding and short.is_decoding
    first = scheduler.schedule_decode(4)
    assert first.rows == [(long, 4), (short, 4)] and first.num_steps == 4
    second = scheduler.schedule_decode(4)
    assert second.rows == [(long, 4), (short, 1)]  # 1 + 4 + 1 = max_tokens
    assert scheduler.schedule_decode(4).rows == [(long, 4)]
    assert len(long.blocks) == 4 and len(short.blocks) == 2  # 3 + 12 and 2 + 5 tokens
    for rows in (prefill, first.rows, second.rows):
        read(scheduler, rows, 4)
    assert short.stop_reason == "length" and scheduler.running == [long]
    assert long.num_generated == 9 and long.num_unread == 4


def test_a_stop_token_read_late_frees_the_blocks() -> None:
    scheduler = make(num_blocks=8)
    scheduler.add(sequence(0, [1, 2, 3], max_tokens=20))
    prefill = launch_prefill(scheduler)
    first, second = scheduler.schedule_decode(4), scheduler.schedule_decode(4)
    read(scheduler, prefill, 1)
    read(scheduler, first.rows, 2)
    assert not scheduler.has_unfinished and scheduler.blocks.num_free == 8
    assert second.rows[0][0].num_generated == 3  # the second launch is ignored


def test_outputs_are_drained_before_preemption() -> None:
    scheduler = make(num_blocks=5, share_prompts=False)
    old, young = sequence(0, [1, 2, 3], max_tokens=13), sequence(1, [4, 5, 6], max_tokens=13)
    in_flight: list[list[tuple[Sequence, int]]] = []

    def drain() -> bool:
        any_in_flight = bool(in_flight)
        while in_flight:
            read(scheduler, in_flight.pop(0), 8)
        return any_in_flight

    scheduler.drain = drain
    scheduler.add(old)
    scheduler.add(young)
    in_flight.append(launch_prefill(scheduler))
    in_flight.append(scheduler.schedule_decode(4).rows)
    assert len(old.blocks) == len(young.blocks) == 2
    window = scheduler.schedule_decode(4)
    assert [s for s, _ in window.rows] == [old]
    assert not in_flight and young.num_preempted == 1 and young.num_unread == 0 and young.num_generated == 5
    assert old.num_unread == 4 and len(old.blocks) == 3


def test_prefill_waits_until_enough_slots_are_free() -> None:
    scheduler = make(seqs=16, share_prompts=False, num_blocks=200, tokens=400)
    for i in range(30):
        scheduler.add(sequence(i, [1, 2, 3], max_tokens=50))
    read(scheduler, launch_prefill(scheduler), 1)
    assert len(scheduler.running) == 16 and not scheduler.prefill_is_due
    scheduler.finish(scheduler.running[0])
    assert not scheduler.prefill_is_due  # one free slot is not worth delaying fifteen sequences
    scheduler.finish(scheduler.running[0])
    assert scheduler.prefill_is_due


def started(scheduler: Scheduler) -> list[int]:
    """Indices in the order in which the sequences start."""
    order: list[int] = []
    while scheduler.has_unfinished:
        step(scheduler)
        order += [s.index for s in scheduler.running if s.index not in order]
    return order


def expecting(scheduler: Scheduler, lengths: dict[int, float]) -> None:
    scheduler.expected_length = lambda s: lengths[s.index]


def test_longest_expected_starts_first() -> None:
    scheduler = make(seqs=1)
    expecting(scheduler, {0: 5, 1: 20, 2: 10, 3: 12.5, 4: 15, 5: 15})
    for i in range(6):
        scheduler.add(sequence(i, [i, i], max_tokens=2))
    assert started(scheduler) == [1, 4, 5, 3, 2, 0]


def test_first_in_first_out_if_no_length_is_expected() -> None:
    scheduler = make(seqs=1)
    for i in range(5):
        scheduler.add(sequence(i, [i, i], max_tokens=2))
    assert started(scheduler) == [0, 1, 2, 3, 4]


def test_longest_first_keeps_the_shared_prompt_of_a_group() -> None:
    scheduler = make(seqs=3)
    scheduler.expected_length = lambda s: 9.0 if s.request.prompt_ids == [4, 5, 6] else 1.0
    for i in range(3):
        scheduler.add(sequence(i, [1, 2, 3], max_tokens=2))
    for i in range(3, 6):
        scheduler.add(sequence(i, [4, 5, 6], max_tokens=2))
    plan = step(scheduler)
    assert computed(plan) == [(3, 0, 3)] and [s.index for s in plan.rows[0].samplers] == [3, 4, 5]
    step(scheduler)
    assert computed(step(scheduler)) == [(0, 0, 3)]


def test_preempted_sequences_start_before_longer_ones() -> None:
    scheduler = make(seqs=2, share_prompts=False)
    expecting(scheduler, {0: 9, 1: 8, 2: 7, 3: 6})
    for i in range(4):
        scheduler.add(sequence(i, [i, i], max_tokens=4))
    step(scheduler)
    scheduler.preempt_above(0)
    expecting(scheduler, {0: 1, 1: 1, 2: 7, 3: 6})
    assert started(scheduler) == [0, 1, 2, 3]


def test_no_sequence_waits_for_all_longer_ones_that_arrive_later() -> None:
    scheduler = make(seqs=1)
    scheduler.expected_length = lambda s: 1.0 if s.index == 1 else 100.0
    for i in range(3):
        scheduler.add(sequence(i, [i, i], max_tokens=2))
    order: list[int] = []
    for i in range(3, 40):  # a stream of longer ones, faster than the scheduler serves them
        step(scheduler)
        order += [s.index for s in scheduler.running if s.index not in order]
        scheduler.add(sequence(i, [i, i], max_tokens=2))
    assert order[:4] == [0, 2, 1, 3]


def test_drafts_are_scheduled_if_their_blocks_are_free() -> None:
    """Of 4 tokens each; two sequences with 3 and 2 tokens."""
    for num_blocks, fits in ((4, True), (3, False)):
        scheduler = make(num_blocks=num_blocks)
        first, second = sequence(0, [1, 2, 3], max_tokens=20), sequence(1, [4, 5], max_tokens=20)
        scheduler.add(first)
        scheduler.add(second)
        read(scheduler, launch_prefill(scheduler), 1)
        drafts = {0: [6, 7], 1: [8, 9, 6]}  # of 3 + 1 + 2 and 2 + 1 + 3 tokens
        window = scheduler.schedule_drafts(scheduler.decodable(), drafts)
        if not fits:
            assert window is None and first.num_unread == 0
            continue
        assert window is not None and window.rows == [(first, 3), (second, 4)] and window.drafts == drafts
        assert scheduler.blocks.num_free == 0 and first.num_unread == 3
        window.keep([3, 2])
        assert window.rows == [(first, 3), (second, 2)]
        assert (first.num_computed, second.num_computed, second.num_unread) == (6, 4, 2)


def test_a_window_with_drafts_has_room_for_the_most_tokens() -> None:
    scheduler = make(num_blocks=7)
    short, long = sequence(0, [1, 2, 3], max_tokens=3), sequence(1, [4, 5], max_tokens=30)
    scheduler.add(short)
    scheduler.add(long)
    step(scheduler)
    assert scheduler.schedule_draft_steps(num_steps=2, size=2, max_draft=4) is None  # no room for drafts
    assert scheduler.schedule_draft_steps(num_steps=8, size=16, max_draft=4) is None  # no blocks for 30 tokens
    window = scheduler.schedule_draft_steps(num_steps=2, size=16, max_draft=4)
    assert window is not None and window.has_drafts and (window.draft_size, window.draft_steps) == (16, 2)
    assert window.rows == [(short, 2), (long, 10)]
    assert [len(s.blocks) for s in (short, long)] == [2, 3]
    window.truncate(0)
    assert scheduler.schedule_decode(1).rows == [(short, 1), (long, 1)]
