"""Rows of decode steps with drafts: which drafts a step computes, the inputs of the model, and what is kept, by naive forms."""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.draft_controller import graph_sizes
from lockstep.engines.rollout.embedded.draft_step import num_agreeing
from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.engines.rollout.embedded.cuda.draft_graphs import DraftGraphs  # noqa: E402
from lockstep.kernels import draft_rows, sampling  # noqa: E402
from lockstep.kernels.draft_decode import GROUP_ROWS  # noqa: E402
from lockstep.kernels.draft_search import (  # noqa: E402
    FOLLOWING_BITS,
    LANES,
    LIVE,
    MAX_SEGMENTS,
    PLACE_BITS,
    SEGMENT_BITS,
    find_drafts,
)
from lockstep.kernels.draft_settings import MAX_MATCH, ROW_DECAY, ROW_WEIGHT, START  # noqa: E402

pytestmark = pytest.mark.gpu
NUM_SLOTS = 30
NUM_STOPS = 2
RING = 4
SIZES = graph_sizes(100)
LEVELS = range(draft_rows.NUM_LEVELS)


def on_device(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def state_rows(num_slots: int) -> Tensor:
    state = torch.zeros(num_slots, sampling.STOPS + NUM_STOPS, dtype=torch.int64)
    state[:, sampling.STOPS :] = -1
    return state


# allot


@dataclass
class Candidate:
    """A row of `allot`.

    match, following: of its best match; 0 for none.
    room:             tokens that may still be sampled.
    right, tried:     of its drafts.
    length:           tokens of its text.
    """

    match: int
    following: int
    room: int
    right: float = 0.0
    tried: float = 0.0
    is_active: bool = True
    length: int = 100

    @property
    def kind(self) -> int:
        """0 for a match of 1 token, then one for each doubling; what precedes the text does not count."""
        return max(0, min(self.match, self.length).bit_length() - 1) if self.is_active else 0

    def num_available(self, max_draft: int) -> int:
        return max(0, min(self.following, self.room - 1, max_draft)) if self.is_active and self.match else 0

    def rate(self, kind_rates: Tensor) -> float:
        right, tried = kind_rates[self.kind].tolist()
        rate = (self.right + ROW_WEIGHT * right / tried) / (self.tried + ROW_WEIGHT)
        return min(max(rate, 0.001), 0.98)

    def chances(self, kind_rates: Tensor, max_draft: int) -> list[float]:
        """That each of its draft tokens is right."""
        rate = self.rate(kind_rates)
        return [rate**k for k in range(1, self.num_available(max_draft) + 1)]


def is_at_least(chance: float, level: int) -> bool:
    return chance >= 2.0 ** (-level / 4)


def is_near_a_level(chances: list[float]) -> bool:
    """Whether rounding may decide."""
    return any(abs(chance * 2.0 ** (level / 4) - 1) < 1e-3 for chance in chances for level in LEVELS)


def random_candidates(rng: random.Random, kind_rates: Tensor, max_draft: int) -> list[Candidate]:
    candidates: list[Candidate] = []
    while len(candidates) < 9:
        tried = rng.choice([0.0, 20 * rng.random()])
        match, following = rng.choice([0, 1, 2, 3, 4, 7, 8, 15, 16]), rng.randrange(0, 20)
        room = rng.choice([1, 2, 5, 100])
        new = Candidate(match, following, room, tried * rng.random(), tried, is_active=rng.random() > 0.2)
        new.length = rng.choice([0, 1, 3, 100])
        if not is_near_a_level(new.chances(kind_rates, max_draft)):
            candidates.append(new)
    return candidates


@dataclass
class Allotted:
    rows: list[list[int]]
    totals: list[int]
    curve: list[float]
    step: int
    kind_rates: Tensor


def source_of(row: int) -> int:
    """The place of a row's draft in the texts."""
    return 3_000_000_000 + 7 * row


def allot(candidates: list[Candidate], kind_rates: Tensor, budget: int, max_draft: int, step: int = -1) -> Allotted:
    """Slots are numbered from the last row on; the best match of a row is in any lane, among worse ones."""
    rng = random.Random(len(candidates) + budget)
    num_rows = len(candidates)
    found = torch.zeros(num_rows + 2, LANES, dtype=torch.int64)
    state, rates = state_rows(num_rows), torch.zeros(num_rows, 2)
    lengths = on_device([each.length for each in reversed(candidates)], torch.int32)
    slot_ids = list(reversed(range(num_rows)))
    for row, (slot, each) in enumerate(zip(slot_ids, candidates)):
        position = rng.randrange(200)
        state[slot, sampling.POSITION] = position
        state[slot, sampling.LAST] = position + each.room
        state[slot, sampling.ACTIVE] = each.is_active
        rates[slot] = torch.tensor([each.right, each.tried])
        if each.match:
            key = ((each.match << FOLLOWING_BITS) + each.following << SEGMENT_BITS) + rng.randrange(MAX_SEGMENTS)
            best = (key << PLACE_BITS) + source_of(row)
            found[row] = torch.tensor([rng.choice([0, rng.randrange(best)]) for _ in range(LANES)])
            found[row, rng.randrange(LANES)] = best
    rows = torch.full((num_rows + 1, draft_rows.NUM_ROW_FIELDS), -7, dtype=torch.int64, device=DEVICE)
    totals, curve = on_device([-7, -7], torch.int32), torch.zeros(2 * draft_rows.NUM_LEVELS + 1, device=DEVICE)
    device_kinds, device_step = kind_rates.clone().to(DEVICE), on_device([step], torch.int32)
    draft_rows.allot(
        *(
            found.to(DEVICE),
            state.to(DEVICE),
            on_device(slot_ids, torch.int32),
            lengths,
            rates.to(DEVICE),
            device_kinds,
        ),
        *(draft_rows.kind_priors(DEVICE), rows, totals, curve, device_step),
        budget=budget,
        ring=RING,
        max_draft=max_draft,
    )
    assert rows[-1].tolist() == [-7] * draft_rows.NUM_ROW_FIELDS
    return Allotted(rows[:-1].tolist(), totals.tolist(), curve.tolist(), int(device_step), device_kinds.cpu())


def naive_drafts(candidates: list[Candidate], kind_rates: Tensor, budget: int, max_draft: int) -> list[int]:
    """All of the last level that fits into the budget, then those of the next one in the order of the rows."""
    chances = [each.chances(kind_rates, max_draft) for each in candidates]
    left = budget - sum(each.is_active for each in candidates)
    chosen = [0] * len(candidates)
    for level in LEVELS:
        for row, of_row in enumerate(chances):
            more = sum(is_at_least(chance, level) for chance in of_row) - chosen[row]
            more = max(0, min(more, left))
            chosen[row] += more
            left -= more
    return chosen


def random_kind_rates(rng: random.Random) -> Tensor:
    tried = torch.tensor([10 + 90 * rng.random() for _ in range(draft_rows.KINDS_PADDED)])
    return torch.stack([tried * torch.tensor([rng.random() for _ in tried]), tried], 1)


@pytest.mark.parametrize("max_draft", [0, 3, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_step_computes_the_likeliest_drafts(seed: int, max_draft: int) -> None:
    """With every budget: one token of every active row, and as many drafts as fit."""
    rng = random.Random(seed)
    kind_rates = random_kind_rates(rng)
    candidates = random_candidates(rng, kind_rates, max_draft)
    num_active = sum(each.is_active for each in candidates)
    chances = [chance for each in candidates for chance in each.chances(kind_rates, max_draft)]
    num_available = sum(is_at_least(chance, LEVELS[-1]) for chance in chances)
    for budget in [0, *range(num_active, num_active + num_available, 3), num_active + num_available, 1000]:
        out = allot(candidates, kind_rates, budget, max_draft)
        drafts = naive_drafts(candidates, kind_rates, budget, max_draft)
        counts = [each.is_active + num for each, num in zip(candidates, drafts)]
        groups = [-(-count // GROUP_ROWS) for count in counts]
        assert [row[draft_rows.COUNT] for row in out.rows] == counts
        assert [row[draft_rows.FIRST_ROW] for row in out.rows] == [sum(counts[:i]) for i in range(len(counts))]
        assert [row[draft_rows.FIRST_GROUP] for row in out.rows] == [sum(groups[:i]) for i in range(len(groups))]
        assert out.totals == [sum(counts), sum(groups)]
        assert sum(counts) == max(num_active, min(budget, num_active + num_available))
        for row, (each, count) in enumerate(zip(candidates, counts)):
            assert count <= max(1, min(each.room, 1 + max_draft))
            if count > 1:
                assert out.rows[row][draft_rows.SOURCE] == source_of(row)
                assert out.rows[row][draft_rows.KIND] == each.kind


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("budget", [0, 12])
def test_the_curve_says_what_each_level_gives(seed: int, budget: int) -> None:
    """Whatever the budget is."""
    rng = random.Random(seed)
    kind_rates = random_kind_rates(rng)
    candidates = random_candidates(rng, kind_rates, max_draft=16)
    out = allot(candidates, kind_rates, budget, max_draft=16)
    chances = [chance for each in candidates for chance in each.chances(kind_rates, 16)]
    of_levels = [[chance for chance in chances if is_at_least(chance, level)] for level in LEVELS]
    assert out.curve[:-1:2] == [len(likely) for likely in of_levels]
    assert out.curve[1:-1:2] == pytest.approx([sum(likely) for likely in of_levels], rel=1e-4, abs=1e-6)
    assert out.curve[-1] == sum(each.is_active for each in candidates)


def test_what_nothing_is_known_of_has_the_prior_of_its_kind() -> None:
    """The k-th draft is computed if prior^k is at least that of the last level, 2^-5.75."""
    kinds = {1: 2, 2: 3, 3: 3, 4: 5, 7: 5, 8: 9, 15: 9, 16: 17}
    candidates = [Candidate(match, following=40, room=100) for match in kinds]
    out = allot(candidates, draft_rows.kind_priors(torch.device("cpu")), budget=1000, max_draft=64)
    assert [row[draft_rows.COUNT] - 1 for row in out.rows] == list(kinds.values())
    assert [row[draft_rows.KIND] for row in out.rows] == [0, 1, 1, 2, 2, 3, 3, 4]
    begun = [Candidate(16, following=40, room=100, length=length) for length in (0, 2, 16)]
    out = allot(begun, draft_rows.kind_priors(torch.device("cpu")), budget=1000, max_draft=64)
    assert [row[draft_rows.KIND] for row in out.rows] == [0, 1, 4]


def test_rates_of_kinds_are_drawn_to_their_priors() -> None:
    """With every call, which also goes on to the next row of the outputs."""
    kind_rates = random_kind_rates(random.Random(5))
    priors = draft_rows.kind_priors(torch.device("cpu"))
    for step, expected_step in [(-1, 0), (1, 2), (RING - 1, 0)]:
        out = allot([Candidate(3, 5, 100)], kind_rates, budget=3, max_draft=4, step=step)
        assert out.step == expected_step
        torch.testing.assert_close(out.kind_rates, priors + (kind_rates - priors) * draft_rows.KIND_DECAY)


# fill


def rows_of(counts: list[int], sources: list[int]) -> tuple[Tensor, Tensor]:
    """`rows` and `totals` as of `allot`."""
    rows = torch.zeros(len(counts), draft_rows.NUM_ROW_FIELDS, dtype=torch.int64)
    num_groups = 0
    for row, count in enumerate(counts):
        rows[row, draft_rows.COUNT] = count
        rows[row, draft_rows.FIRST_ROW] = sum(counts[:row])
        rows[row, draft_rows.FIRST_GROUP] = num_groups
        rows[row, draft_rows.SOURCE] = sources[row]
        num_groups += -(-count // GROUP_ROWS)
    return rows.to(DEVICE), on_device([sum(counts), num_groups], torch.int32)


@pytest.mark.parametrize("has_images", [False, True])
@pytest.mark.parametrize(
    "counts", [[1], [8], [9], [1, 17, 8, 3], [0, 3, 0, 0, 9, 0], [2] * 3 + [16] * 4 + [1] * 20, [1] * 30, [33, 1], [0]]
)
def test_rows_and_their_groups(counts: list[int], has_images: bool) -> None:
    """Steps before have no effect. Without any sequence there is padding alone, as when a graph is captured."""
    block_size, num_blocks, max_draft = 4, 20, 40
    total, num_rows = sum(counts), SIZES[-1]
    size = next(size for size in SIZES if size >= max(1, total))
    slot_ids = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(2))[: len(counts)].tolist()
    starts = [3 + 5 * row % 40 for row in range(len(counts))]
    sources = [10 + 50 * row for row in range(len(counts))]
    texts = torch.arange(5000, 5000 + 50 * NUM_SLOTS + 60, dtype=torch.int32)
    state = torch.randint(1000, (NUM_SLOTS + 1, sampling.STOPS + NUM_STOPS))
    for slot, start in zip(slot_ids, starts):
        state[slot, sampling.POSITION] = start
    options = torch.rand(NUM_SLOTS + 1, sampling.NUM_OPTIONS)
    tables = torch.randperm((NUM_SLOTS + 1) * num_blocks).int().view(NUM_SLOTS + 1, num_blocks)
    deltas = torch.randint(-3, 4, (NUM_SLOTS + 1,)) if has_images else None
    inputs = torch.full((draft_rows.NUM_INPUTS, num_rows), 77, device=DEVICE)
    row_state = torch.full((num_rows, sampling.STOPS + sampling.MIN_STOPS), 78, device=DEVICE)
    row_options = torch.full((num_rows, sampling.NUM_OPTIONS), 79.0, device=DEVICE)
    slots: Any = SimpleNamespace(slots=SimpleNamespace(padding_slot=NUM_SLOTS))
    num_groups = DraftGraphs._num_groups(slots, size)
    group_starts = torch.full((num_groups + 2,), 80, device=DEVICE)
    rows, totals = rows_of(counts, sources)
    draft_rows.fill(
        *(rows, totals, texts.to(DEVICE), state.to(DEVICE), options.to(DEVICE), on_device(slot_ids, torch.int32)),
        *(tables.to(DEVICE), None if deltas is None else deltas.to(DEVICE)),
        *(inputs, row_state, row_options, group_starts[:-1]),
        size=size,
        block_size=block_size,
        max_draft=max_draft,
    )

    # of every token: its slot, place after the last token of the sequence, and row of the sequence
    tokens = [(slot, place, row) for row, (slot, n) in enumerate(zip(slot_ids, counts)) for place in range(n)]
    positions = [starts[row] + place for _, place, row in tokens]
    num_padding = size - total
    made = inputs[:, :size].cpu()
    drafts = [int(texts[sources[row] + place - 1]) for _, place, row in tokens]
    assert (
        made[draft_rows.TOKEN].tolist()
        == [
            int(state[slot, sampling.TOKEN]) if place == 0 else draft for (slot, place, _), draft in zip(tokens, drafts)
        ]
        + [0] * num_padding
    )
    assert made[draft_rows.POSITION].tolist() == positions + [0] * num_padding
    rotary = [p + (0 if deltas is None else int(deltas[slot])) for p, (slot, _, _) in zip(positions, tokens)]
    assert made[draft_rows.ROTARY].tolist() == rotary + [0] * num_padding
    assert made[draft_rows.SLOT_ID].tolist() == [slot for slot, _, _ in tokens] + [NUM_SLOTS] * num_padding
    blocks = [int(tables[slot, p // block_size]) for p, (slot, _, _) in zip(positions, tokens)]
    cache_slots = [block * block_size + p % block_size for block, p in zip(blocks, positions)]
    assert made[draft_rows.CACHE_SLOT].tolist() == cache_slots + [-1] * num_padding

    sampled = row_state[:size].cpu()
    assert sampled[:, sampling.ACTIVE].tolist() == [1] * total + [0] * num_padding
    assert sampled[:total, sampling.POSITION].tolist() == positions
    assert sampled[:total, sampling.LAST].tolist() == [p + 1 for p in positions]  # one token is sampled
    slots_T = [slot for slot, _, _ in tokens]
    for field in (sampling.SEED, sampling.TOP_K):
        assert sampled[:total, field].tolist() == state[slots_T, field].tolist()
    assert sampled[:, sampling.STOPS :].eq(78).all()  # they stay as they are
    assert row_options[:total].tolist() == options[slots_T].tolist()
    assert inputs[:, size:].eq(77).all() and row_state[size:].eq(78).all() and row_options[size:].eq(79).all()

    expected = []
    for count in [*counts, num_padding]:
        expected += [min(GROUP_ROWS, count - first) for first in range(0, count, GROUP_ROWS)]
    group_sizes = group_starts[:-1].diff().tolist()
    assert group_sizes[: len(expected)] == expected and not any(group_sizes[len(expected) :])
    assert int(group_starts[0]) == 0 and int(group_starts[-2]) == size and int(group_starts[-1]) == 80
    assert len(expected) <= num_groups <= size  # the launch of the attention has as many


# accept and append


class Step:
    """A step of which the rows were sampled, and what is kept of it. width: places of a slot's text."""

    def __init__(self, counts: list[int], slot_ids: list[int], max_draft: int, width: int = 40) -> None:
        num_slots = max(slot_ids) + 2
        self.counts, self.slot_ids, self.width = counts, slot_ids, width
        self.rows, _ = rows_of(counts, [0] * len(counts))
        self.inputs = torch.zeros(draft_rows.NUM_INPUTS, sum(counts) + 1, dtype=torch.int64)
        self.sampled = torch.zeros(1, sum(counts) + 1, dtype=torch.int32)
        self.log_probs = -torch.rand(1, sum(counts) + 1)
        self.state = state_rows(num_slots)
        self.texts = torch.full((num_slots * width,), START, dtype=torch.int32)
        self.lengths = torch.zeros(num_slots, dtype=torch.int32)
        self.row_rates, self.kind_rates = torch.rand(num_slots, 2) * 9, torch.rand(draft_rows.KINDS_PADDED, 2) * 90
        self.tokens = torch.full((RING, num_slots, 1 + max_draft), -7, dtype=torch.int32)
        self.out_log_probs = torch.full((RING, num_slots, 1 + max_draft), -7.0)
        self.drafted = torch.full((RING, num_slots), -7, dtype=torch.int32)
        self.step = 2

    def parts(self, row: int) -> slice:
        """The tokens of a row."""
        first = sum(self.counts[:row])
        return slice(first, first + self.counts[row])

    def set_row(self, row: int, drafts: list[int], sampled: list[int], stops: list[int], left: int) -> None:
        """left: tokens that may still be sampled."""
        at, slot = self.parts(row), self.slot_ids[row]
        self.inputs[draft_rows.TOKEN, at] = torch.tensor([99, *drafts])
        self.sampled[0, at] = torch.tensor(sampled, dtype=torch.int32)
        position = 10 + row
        fields = [position, 1, 5, position + left, 99, 0, *stops, *[-1] * (NUM_STOPS - len(stops))]
        self.state[slot] = torch.tensor(fields)

    def text(self, slot: int) -> list[int]:
        first = slot * self.width + MAX_MATCH
        tokens: list[int] = self.texts[first : first + int(self.lengths[slot])].tolist()
        return tokens

    def accept(self) -> "Step":
        """What the kernel makes of it."""
        names = ["state", "texts", "lengths", "row_rates", "kind_rates", "tokens", "out_log_probs", "drafted"]
        after = Step(self.counts, self.slot_ids, self.tokens.shape[2] - 1, self.width)
        device = {name: getattr(self, name).clone().to(DEVICE) for name in names}
        draft_rows.accept(
            *(self.rows, on_device(self.slot_ids, torch.int32), device["state"], self.inputs.to(DEVICE)),
            *(self.sampled.to(DEVICE), self.log_probs.to(DEVICE), device["texts"], device["lengths"]),
            *(device["row_rates"], device["kind_rates"], on_device([self.step], torch.int32)),
            *(device["tokens"], device["out_log_probs"], device["drafted"]),
            width=self.width,
        )
        for name, values in device.items():
            setattr(after, name, values.cpu())
        return after


def check_accepted(step: Step) -> Step:
    """Against the host's rule, row by row; what belongs to no row of the step stays."""
    after = step.accept()
    state, rates, kinds = step.state.clone(), step.row_rates.clone(), step.kind_rates.clone()
    texts = {slot: step.text(slot) for slot in range(len(state))}
    tokens, drafted = step.tokens.clone(), step.drafted.clone()
    for row, (slot, count) in enumerate(zip(step.slot_ids, step.counts)):
        tokens[step.step, slot] = -1
        drafted[step.step, slot] = max(0, count - 1)
        if count == 0:
            continue
        at = step.parts(row)
        sampled, draft = step.sampled[0, at].tolist(), step.inputs[draft_rows.TOKEN, at].tolist()[1:]
        stop_ids = frozenset(state[slot, sampling.STOPS :].tolist()) - {-1}
        num_kept = num_agreeing(list(sampled), draft, stop_ids)
        kept = sampled[:num_kept]
        tokens[step.step, slot, :num_kept] = torch.tensor(kept)
        log_probs = after.out_log_probs[step.step, slot, :num_kept]
        assert log_probs.tolist() == step.log_probs[0, at][:num_kept].tolist()
        texts[slot] = texts[slot] + kept
        state[slot, sampling.POSITION] += num_kept
        state[slot, sampling.TOKEN] = kept[-1]
        has_stopped = kept[-1] in stop_ids
        is_done = has_stopped or state[slot, sampling.POSITION] >= state[slot, sampling.LAST]
        state[slot, sampling.ACTIVE] = not is_done
        if count > 1:
            new = torch.tensor([num_kept - 1, num_kept - 1 + (num_kept < count and not has_stopped)])
            rates[slot] = rates[slot] * ROW_DECAY + new
            kinds[int(step.rows[row, draft_rows.KIND])] += new
    assert after.tokens.tolist() == tokens.tolist()
    assert after.drafted.tolist() == drafted.tolist()
    assert after.state.tolist() == state.tolist()
    assert [after.text(slot) for slot in range(len(state))] == list(texts.values())
    torch.testing.assert_close(after.row_rates, rates)
    torch.testing.assert_close(after.kind_rates, kinds)
    unseen = [place for place in range(RING) if place != step.step]
    assert after.out_log_probs[unseen].eq(-7).all()
    return after


@pytest.mark.parametrize("seed", range(12))
def test_what_agrees_is_kept(seed: int) -> None:
    """Stop tokens lie inside drafts and behind them, rows have no drafts or no tokens, and the last token may be reached."""
    rng = random.Random(seed)
    max_draft = rng.choice([5, 31, 40])
    counts = [rng.choice([0, 1, 2, 5, rng.randrange(2 + max_draft)]) for _ in range(7)]
    step = Step(counts, rng.sample(range(10), 7), max_draft, width=MAX_MATCH + 6 + max_draft)
    for row, count in enumerate(counts):
        slot = step.slot_ids[row]
        length = rng.randrange(6)
        step.lengths[slot] = length
        first = slot * step.width + MAX_MATCH
        step.texts[first : first + length] = torch.tensor([rng.randrange(9) for _ in range(length)])
        step.rows[row, draft_rows.KIND] = rng.randrange(len(draft_rows.KIND_PRIORS))
        if count:
            drafts = [rng.randrange(6) for _ in range(count - 1)]
            wrong = rng.choice([0.0, 0.1, 0.5])
            sampled = [rng.randrange(6) if rng.random() < wrong else token for token in [*drafts, 3]]
            step.set_row(
                row, drafts, sampled, rng.choice([[], [3], [5], [4, 0]]), left=count + rng.choice([0, 0, 1, 50])
            )
    check_accepted(step)


def test_a_sequence_ends_at_a_stop_token_or_at_its_last_one() -> None:
    """Row by row: all drafts right; the same at the end; a wrong one; a stop token that was drafted; one that was not."""
    step = Step([4, 4, 4, 4, 4, 1, 0], [6, 1, 3, 0, 2, 7, 5], max_draft=3)
    right = [1, 2, 3, 4]
    step.set_row(0, [1, 2, 3], right, [9], left=5)
    step.set_row(1, [1, 2, 3], right, [9], left=4)
    step.set_row(2, [1, 2, 3], [1, 7, 3, 4], [9], left=4)
    step.set_row(3, [1, 2, 3], right, [2], left=9)
    step.set_row(4, [1, 2, 3], [1, 9, 3, 4], [8, 9], left=9)
    step.set_row(5, [], [4], [4], left=9)
    after = check_accepted(step)
    slots = step.slot_ids
    kept = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 7], [1, 2], [1, 9], [4], []]
    assert [after.text(slot) for slot in slots] == kept
    assert after.state[slots, sampling.ACTIVE].tolist() == [1, 0, 1, 0, 0, 0, 0]
    assert (after.row_rates - step.row_rates * ROW_DECAY)[slots[:5]].round().tolist() == [
        [3.0, 3.0],
        [3.0, 3.0],
        [1.0, 2.0],
        [1.0, 1.0],  # says nothing about the rest of the draft
        [1.0, 1.0],
    ]


def test_plain_steps_append_to_the_texts() -> None:
    """Up to the end of each sequence; what has no place is dropped. Padding rows have one slot, which samples nothing."""
    width = MAX_MATCH + 5
    sampled = on_device([[4, 7, 0, -1, 5], [6, -1, 9, -1, 5], [8, -1, 1, -1, 5], [3, 3, 3, 3, 3]], torch.int32)
    texts = torch.full((5 * width,), START, dtype=torch.int32, device=DEVICE)
    lengths = on_device([1, 0, 4, 0, 2], torch.int32)
    draft_rows.append(on_device([2, 0, 1, 3, 3], torch.int32), sampled, 3, texts, lengths, width=width)
    assert lengths.tolist() == [4, 1, 5, 0, 2]
    places = texts.view(5, width)
    assert places[:, :MAX_MATCH].eq(START).all()
    expected = [[-1, 4, 6, 8, -1], [7, -1, -1, -1, -1], [-1, -1, -1, -1, 0], [-1] * 5, [-1] * 5]
    assert places[:, MAX_MATCH:].tolist() == expected


# all of them


def test_steps_with_drafts_give_the_tokens_of_plain_steps() -> None:
    """A model that knows the answers, which are alike, computes them in fewer steps than tokens. One ends by a stop token."""
    rng = random.Random(1)
    stem = rng.choices(range(8), k=20)
    answers = [stem, [*stem[:9], 8, *stem[9:15], 9], [8, 8, *stem[4:17]]]
    num_slots, max_draft, size, num_prompt, block_size = 4, 5, 12, 3, 4
    width = MAX_MATCH + 40
    state = state_rows(num_slots)
    for slot, answer in enumerate(answers):
        fields = [num_prompt - 1, 1, 0, num_prompt + len(answer) - 1 + (slot == 1) * 5, 7, 0, 9, -1]
        state[slot] = torch.tensor(fields)
    state = state.to(DEVICE)
    texts = torch.full((num_slots * width + MAX_MATCH + 12,), START, dtype=torch.int32, device=DEVICE)
    texts[-12:] = on_device(stem[:12], torch.int32)
    segments = torch.zeros(num_slots, MAX_SEGMENTS, 2, dtype=torch.int64)
    segments[:3, 0] = torch.tensor([len(texts) - 12, len(texts)])
    segments[:3, 1:4] = torch.tensor([[0, LIVE], [1, LIVE], [2, LIVE]])
    segments, slot_ids = segments.to(DEVICE), on_device([2, 0, 1, 3], torch.int32)
    lengths, step = on_device([0] * num_slots, torch.int32), on_device([-1], torch.int32)
    found, rows = on_device([[0] * LANES] * 4), on_device([[0] * draft_rows.NUM_ROW_FIELDS] * 4)
    totals, curve = on_device([0, 0], torch.int32), torch.zeros(2 * draft_rows.NUM_LEVELS + 1, device=DEVICE)
    row_rates, priors = torch.zeros(num_slots, 2, device=DEVICE), draft_rows.kind_priors(DEVICE)
    kind_rates = priors.clone()
    inputs = torch.zeros(draft_rows.NUM_INPUTS, size, dtype=torch.int64, device=DEVICE)
    row_state = torch.zeros(size, sampling.STOPS + NUM_STOPS, dtype=torch.int64, device=DEVICE)
    options, row_options = (torch.ones(n, sampling.NUM_OPTIONS, device=DEVICE) for n in (num_slots, size))
    group_starts = on_device([0] * (size + 1))
    tables = on_device([list(range(10))] * num_slots, torch.int32)
    out_tokens = torch.full((RING, num_slots, 1 + max_draft), -1, dtype=torch.int32, device=DEVICE)
    out_log_probs, out_drafted = torch.zeros(out_tokens.shape, device=DEVICE), out_tokens[:, :, 0].clone()
    outputs: list[list[int]] = [[] for _ in range(num_slots)]
    num_steps = 0
    while state[:, sampling.ACTIVE].any():
        num_steps += 1
        find_drafts(texts, lengths, segments, state, slot_ids, found, width=width, max_draft=max_draft)
        draft_rows.allot(
            *(found, state, slot_ids, lengths, row_rates, kind_rates, priors, rows, totals, curve, step),
            budget=size,
            ring=RING,
            max_draft=max_draft,
        )
        draft_rows.fill(
            *(rows, totals, texts, state, options, slot_ids, tables, None),
            *(inputs, row_state, row_options, group_starts),
            size=size,
            block_size=block_size,
            max_draft=max_draft,
        )
        sampled = [0] * size
        for row, (slot, position) in enumerate(inputs[[draft_rows.SLOT_ID, draft_rows.POSITION]].T.tolist()):
            place = position + 1 - num_prompt
            if slot < len(answers) and place < len(answers[slot]):
                sampled[row] = answers[slot][place]
        draft_rows.accept(
            *(rows, slot_ids, state, inputs, on_device([sampled], torch.int32), torch.zeros(1, size, device=DEVICE)),
            *(texts, lengths, row_rates, kind_rates, step, out_tokens, out_log_probs, out_drafted),
            width=width,
        )
        for slot, tokens in enumerate(out_tokens[int(step)].tolist()):
            outputs[slot] += [token for token in tokens if token >= 0]
    assert outputs == [*answers, []]
    assert num_steps < 15
    of_slots = texts[: num_slots * width].view(num_slots, width)[:, MAX_MATCH:].tolist()
    assert [tokens[:length] for tokens, length in zip(of_slots, lengths.tolist())] == outputs
