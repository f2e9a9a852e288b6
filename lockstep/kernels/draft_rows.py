"""The rows of decode steps with drafts, made and judged on the device, so that the host waits for none of them.

    found ─► allot: drafts per sequence ─► fill: a row per token ─► forward, sample each row ─► accept: keep what agrees
                                                                    plain steps, sample ─► append

`allot` gives a step of S tokens to the draft tokens that are likeliest to be right: the k-th of a row is with probability p^k,
where p is the share of the row's drafts that were right lately. A row of which little is known has the share of all matches that
were about as long. Legend: a row is a sequence in `allot` and `accept`, and a token in the inputs of the model.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import sampling
from lockstep.kernels.draft_decode import GROUP_ROWS
from lockstep.kernels.draft_search import FOLLOWING_BITS, LANES, PLACE_BITS, SEGMENT_BITS
from lockstep.kernels.draft_settings import MAX_ACCEPTANCE, MAX_MATCH, ROW_DECAY, ROW_WEIGHT

TOKEN, POSITION, ROTARY, SLOT_ID, CACHE_SLOT, NUM_INPUTS = range(6)
"""Inputs of the model per token: token, positions in the sequence and for the rotary embedding, decode slot (for its block table),
cache slot."""
COUNT, FIRST_ROW, FIRST_GROUP, SOURCE, KIND, NUM_ROW_FIELDS = range(6)
"""What `allot` says of a sequence: its tokens in the step, where its rows and groups of rows begin, the place of its draft, and
the kind of its match."""
KIND_PRIORS = (0.2, 0.35, 0.5, 0.65, 0.8)
"""The share of right tokens after matches of at most 1, 2 to 3, 4 to 7, 8 to 15 and 16 tokens, before anything is known."""
KINDS_PADDED = 8
KIND_WEIGHT = 16.0
"""The prior of a kind counts as this many tokens."""
KIND_DECAY = 0.999
"""Decay of what was seen, per step with drafts."""
NUM_LEVELS = 24
"""Probabilities 2^-(i / 4) for which the curve of `allot` says how many draft tokens are at least as likely, and how many of those
are expected to be right."""

_PLACE_BITS, _LANES = tl.constexpr(PLACE_BITS), tl.constexpr(LANES)
_FOLLOWING_SHIFT = tl.constexpr(PLACE_BITS + SEGMENT_BITS)
_MATCH_SHIFT = tl.constexpr(PLACE_BITS + SEGMENT_BITS + FOLLOWING_BITS)
_FOLLOWING_MASK = tl.constexpr((1 << FOLLOWING_BITS) - 1)
_PLACE_MASK = tl.constexpr((1 << PLACE_BITS) - 1)
_MAX_MATCH, _GROUP = tl.constexpr(MAX_MATCH), tl.constexpr(GROUP_ROWS)
_COUNT, _FIRST_ROW, _FIRST_GROUP = tl.constexpr(COUNT), tl.constexpr(FIRST_ROW), tl.constexpr(FIRST_GROUP)
_SOURCE, _KIND, _NUM_ROW_FIELDS = tl.constexpr(SOURCE), tl.constexpr(KIND), tl.constexpr(NUM_ROW_FIELDS)
_IN_TOKEN, _IN_POSITION, _IN_ROTARY = tl.constexpr(TOKEN), tl.constexpr(POSITION), tl.constexpr(ROTARY)
_IN_SLOT_ID, _IN_CACHE_SLOT = tl.constexpr(SLOT_ID), tl.constexpr(CACHE_SLOT)
_MAX_ACCEPTANCE = tl.constexpr(MAX_ACCEPTANCE)
_KINDS_PADDED = tl.constexpr(KINDS_PADDED)
_NUM_LEVELS, _ROW_WEIGHT = tl.constexpr(NUM_LEVELS), tl.constexpr(ROW_WEIGHT)
_ROW_DECAY, _KIND_DECAY = tl.constexpr(ROW_DECAY), tl.constexpr(KIND_DECAY)
_POSITION, _ACTIVE, _SEED = (tl.constexpr(x) for x in (sampling.POSITION, sampling.ACTIVE, sampling.SEED))
_LAST, _TOKEN, _TOP_K = (tl.constexpr(x) for x in (sampling.LAST, sampling.TOKEN, sampling.TOP_K))
_STOPS, _NUM_OPTIONS = tl.constexpr(sampling.STOPS), tl.constexpr(sampling.NUM_OPTIONS)


@triton.jit
def _num_likely(num, level, log_p):
    """Draft tokens whose probability is at least 2^-(level / 4). log_p: of one, to base 2."""
    return tl.minimum(num, tl.floor(level * -0.25 / log_p).to(tl.int32))


@triton.jit(do_not_specialize=["num_rows", "budget"])
def _allot(
    found_ptr, state_ptr, slot_ids_ptr, lengths_ptr, row_rates_ptr, kind_rates_ptr, priors_ptr,
    rows_ptr, totals_ptr, curve_ptr, step_ptr,
    num_rows, budget, ring, FIELDS: tl.constexpr, MAX_DRAFT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(slot_ids_ptr + row, mask=inside, other=0).to(tl.int64)
    fields = state_ptr + slot * FIELDS
    active = inside & (tl.load(fields + _ACTIVE, mask=inside, other=0) != 0)
    best = tl.zeros([ROWS], tl.int64)
    for lane in tl.static_range(_LANES):
        best = tl.maximum(best, tl.load(found_ptr + row * _LANES + lane, mask=active, other=0))
    match = best >> _MATCH_SHIFT
    # what precedes a text is no evidence
    length = tl.minimum(match, tl.load(lengths_ptr + slot, mask=active, other=0).to(tl.int64))
    kind = tl.zeros([ROWS], tl.int32)
    for i in tl.static_range(1, 5):
        kind += (length >= (1 << i)).to(tl.int32)
    position = tl.load(fields + _POSITION, mask=active, other=0)
    room = tl.load(fields + _LAST, mask=active, other=0) - position - 1  # one more token is sampled
    num = tl.minimum((best >> _FOLLOWING_SHIFT) & _FOLLOWING_MASK, tl.minimum(room, MAX_DRAFT))
    num = tl.where(match > 0, tl.maximum(num, 0), 0).to(tl.int32)

    prior = tl.load(kind_rates_ptr + kind * 2) / tl.load(kind_rates_ptr + kind * 2 + 1)
    right = tl.load(row_rates_ptr + slot * 2, mask=active, other=0.0)
    tried = tl.load(row_rates_ptr + slot * 2 + 1, mask=active, other=0.0)
    p = tl.minimum((right + prior * _ROW_WEIGHT) / (tried + _ROW_WEIGHT), _MAX_ACCEPTANCE)
    p = tl.maximum(p, 0.001)
    log_p = tl.log2(p)

    num_active = tl.sum(active.to(tl.int32), 0)
    left = tl.maximum(budget - num_active, 0)
    chosen = tl.zeros([ROWS], tl.int32)
    level = tl.zeros([], tl.int32)
    for i in range(_NUM_LEVELS):
        likely = _num_likely(num, i, log_p)
        total = tl.sum(likely, 0)
        gain = tl.sum(tl.where(likely > 0, p * (1.0 - tl.exp2(likely * log_p)) / (1.0 - p), 0.0), 0)
        tl.store(curve_ptr + 2 * i, total.to(tl.float32))
        tl.store(curve_ptr + 2 * i + 1, gain)
        if total <= left:
            chosen = likely
            level = i
    tl.store(curve_ptr + 2 * _NUM_LEVELS, num_active.to(tl.float32))
    # of the next level's tokens as many as there is room for
    level = tl.minimum(level + 1, _NUM_LEVELS - 1)
    more = tl.maximum(_num_likely(num, level, log_p) - chosen, 0)
    before = tl.sum(chosen, 0) + tl.cumsum(more, 0) - more
    chosen += tl.minimum(more, tl.maximum(left - before, 0))

    count = tl.where(active, 1 + chosen, 0)
    groups = (count + _GROUP - 1) // _GROUP
    rows_at = rows_ptr + row * _NUM_ROW_FIELDS
    tl.store(rows_at + _COUNT, count.to(tl.int64), mask=inside)
    tl.store(rows_at + _FIRST_ROW, (tl.cumsum(count, 0) - count).to(tl.int64), mask=inside)
    tl.store(rows_at + _FIRST_GROUP, (tl.cumsum(groups, 0) - groups).to(tl.int64), mask=inside)
    tl.store(rows_at + _SOURCE, best & _PLACE_MASK, mask=inside)
    tl.store(rows_at + _KIND, kind.to(tl.int64), mask=inside)
    tl.store(totals_ptr, tl.sum(count, 0))
    tl.store(totals_ptr + 1, tl.sum(groups, 0))
    tl.store(step_ptr, (tl.load(step_ptr) + 1) % ring)
    place = tl.arange(0, 2 * _KINDS_PADDED)
    initial = tl.load(priors_ptr + place)
    tl.store(kind_rates_ptr + place, initial + (tl.load(kind_rates_ptr + place) - initial) * _KIND_DECAY)


@triton.jit(do_not_specialize=["num_rows", "size", "num_groups", "table_width", "padding_slot"])
def _fill(
    rows_ptr, totals_ptr, texts_ptr, state_ptr, options_ptr, slot_ids_ptr, tables_ptr, rope_deltas_ptr,
    inputs_ptr, row_state_ptr, row_options_ptr, group_starts_ptr,
    num_rows, size, num_groups, inputs_stride, table_width, padding_slot,
    FIELDS: tl.constexpr, ROW_FIELDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    if program < num_rows:
        rows_at = rows_ptr + program * _NUM_ROW_FIELDS
        count = tl.load(rows_at + _COUNT)
        row = tl.load(rows_at + _FIRST_ROW) + lane
        inside = lane < count
        slot = tl.load(slot_ids_ptr + program).to(tl.int64)
        fields = state_ptr + slot * FIELDS
        position = tl.load(fields + _POSITION) + lane
        is_draft = inside & (lane > 0)
        token = tl.load(texts_ptr + tl.load(rows_at + _SOURCE) + lane - 1, mask=is_draft, other=0).to(tl.int64)
        token = tl.where(lane == 0, tl.load(fields + _TOKEN), token)
        block = tl.load(tables_ptr + slot * table_width + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        rotary = position
        if rope_deltas_ptr is not None:
            rotary += tl.load(rope_deltas_ptr + slot)
        tl.store(inputs_ptr + _IN_TOKEN * inputs_stride + row, token, mask=inside)
        tl.store(inputs_ptr + _IN_POSITION * inputs_stride + row, position, mask=inside)
        tl.store(inputs_ptr + _IN_ROTARY * inputs_stride + row, rotary, mask=inside)
        tl.store(inputs_ptr + _IN_SLOT_ID * inputs_stride + row, slot + lane * 0, mask=inside)
        tl.store(
            inputs_ptr + _IN_CACHE_SLOT * inputs_stride + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside
        )
        state = row_state_ptr + row * ROW_FIELDS
        tl.store(state + _POSITION, position, mask=inside)
        tl.store(state + _ACTIVE, position * 0 + 1, mask=inside)
        tl.store(state + _SEED, tl.load(fields + _SEED) + position * 0, mask=inside)
        tl.store(state + _LAST, position + 1, mask=inside)
        tl.store(state + _TOP_K, tl.load(fields + _TOP_K) + position * 0, mask=inside)
        for i in tl.static_range(_NUM_OPTIONS):
            option = tl.load(options_ptr + slot * _NUM_OPTIONS + i)
            tl.store(row_options_ptr + row * _NUM_OPTIONS + i, option + lane.to(tl.float32) * 0.0, mask=inside)
        group = tl.load(rows_at + _FIRST_GROUP) + lane
        tl.store(group_starts_ptr + group, row - lane + lane * _GROUP, mask=lane * _GROUP < count)
    else:  # rows and groups behind those of the sequences: padding, which writes nothing
        offset = (program - num_rows) * WIDTH + lane
        total = tl.load(totals_ptr).to(tl.int64)
        row = total + offset
        inside = row < size
        tl.store(inputs_ptr + _IN_TOKEN * inputs_stride + row, row * 0, mask=inside)
        tl.store(inputs_ptr + _IN_POSITION * inputs_stride + row, row * 0, mask=inside)
        tl.store(inputs_ptr + _IN_ROTARY * inputs_stride + row, row * 0, mask=inside)
        tl.store(inputs_ptr + _IN_SLOT_ID * inputs_stride + row, row * 0 + padding_slot, mask=inside)
        tl.store(inputs_ptr + _IN_CACHE_SLOT * inputs_stride + row, row * 0 - 1, mask=inside)
        tl.store(row_state_ptr + row * ROW_FIELDS + _ACTIVE, row * 0, mask=inside)
        group = tl.load(totals_ptr + 1).to(tl.int64) + offset
        start = tl.minimum(total + offset * _GROUP, size)
        tl.store(group_starts_ptr + group, start, mask=group <= num_groups)


@triton.jit(do_not_specialize=["text_width", "num_outputs", "inputs_stride"])
def _accept(
    rows_ptr, slot_ids_ptr, state_ptr, inputs_ptr, sampled_ptr, log_probs_ptr,
    texts_ptr, lengths_ptr, row_rates_ptr, kind_rates_ptr, step_ptr,
    out_tokens_ptr, out_log_probs_ptr, out_drafted_ptr, num_slots, num_outputs, text_width, inputs_stride,
    FIELDS: tl.constexpr, NUM_STOPS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    rows_at = rows_ptr + tl.program_id(0) * _NUM_ROW_FIELDS
    lane = tl.arange(0, WIDTH)
    slot = tl.load(slot_ids_ptr + tl.program_id(0)).to(tl.int64)
    fields = state_ptr + slot * FIELDS
    count = tl.load(rows_at + _COUNT).to(tl.int32)
    row = tl.load(rows_at + _FIRST_ROW) + lane
    sampled = tl.load(sampled_ptr + row, mask=lane < count, other=-1).to(tl.int64)
    log_probs = tl.load(log_probs_ptr + row, mask=lane < count, other=0.0)
    drafted = tl.load(inputs_ptr + _IN_TOKEN * inputs_stride + row + 1, mask=lane < count - 1, other=-2)
    stops = lane < 0
    for i in tl.static_range(NUM_STOPS):
        stops = stops | (sampled == tl.load(fields + _STOPS + i))
    goes_on = (sampled == drafted) & (stops == 0)
    kept = tl.minimum(tl.min(tl.where(goes_on, WIDTH, lane + 1), 0), count)
    is_last = lane == kept - 1
    token = tl.sum(tl.where(is_last, sampled, 0), 0)
    stopped = tl.max((is_last & stops).to(tl.int32), 0) > 0

    place = tl.load(step_ptr).to(tl.int64) * num_slots + slot
    is_output = lane < num_outputs
    tl.store(
        out_tokens_ptr + place * num_outputs + lane, tl.where(lane < kept, sampled, -1).to(tl.int32), mask=is_output
    )
    tl.store(out_log_probs_ptr + place * num_outputs + lane, log_probs, mask=is_output)
    tl.store(out_drafted_ptr + place, tl.maximum(count - 1, 0))
    if count > 0:
        length = tl.load(lengths_ptr + slot)
        inside = (lane < kept) & (_MAX_MATCH + length + lane < text_width)
        tl.store(texts_ptr + slot * text_width + _MAX_MATCH + length + lane, sampled.to(tl.int32), mask=inside)
        tl.store(lengths_ptr + slot, tl.minimum(length + kept, text_width - _MAX_MATCH))
        position = tl.load(fields + _POSITION) + kept
        done = stopped | (position >= tl.load(fields + _LAST))
        tl.store(fields + _POSITION, position)
        tl.store(fields + _TOKEN, token)
        tl.store(fields + _ACTIVE, tl.where(done, 0, 1).to(tl.int64))
        if count > 1:
            right = (kept - 1).to(tl.float32)
            tried = right + tl.where((kept < count) & (stopped == 0), 1.0, 0.0)
            rate = row_rates_ptr + slot * 2
            tl.store(rate, tl.load(rate) * _ROW_DECAY + right)
            tl.store(rate + 1, tl.load(rate + 1) * _ROW_DECAY + tried)
            kind = tl.load(rows_at + _KIND)
            tl.atomic_add(kind_rates_ptr + kind * 2, right)
            tl.atomic_add(kind_rates_ptr + kind * 2 + 1, tried)


@triton.jit(do_not_specialize=["num_steps", "num_slots", "text_width"])
def _append(slot_ids_ptr, sampled_ptr, texts_ptr, lengths_ptr, num_steps, num_slots, text_width):
    slot = tl.load(slot_ids_ptr + tl.program_id(0)).to(tl.int64)
    length = tl.load(lengths_ptr + slot)
    text = texts_ptr + slot * text_width + _MAX_MATCH
    for step in range(num_steps):
        token = tl.load(sampled_ptr + step * num_slots + slot)
        if (token >= 0) & (_MAX_MATCH + length < text_width):
            tl.store(text + length, token)
            length += 1
    tl.store(lengths_ptr + slot, length)


def kind_priors(device: torch.device) -> Tensor:
    """(KINDS_PADDED, 2) what counts as right and as tried of each kind of match before anything is known."""
    priors = torch.ones(KINDS_PADDED, 2, device=device)
    priors[: len(KIND_PRIORS), 0] = torch.tensor(KIND_PRIORS) * KIND_WEIGHT
    priors[: len(KIND_PRIORS), 1] = KIND_WEIGHT
    return priors


def allot(
    found: Tensor,
    slot_state: Tensor,
    slot_ids: Tensor,
    lengths: Tensor,
    row_rates: Tensor,
    kind_rates: Tensor,
    priors: Tensor,
    rows: Tensor,
    totals: Tensor,
    curve: Tensor,
    step: Tensor,
    *,
    budget: int,
    ring: int,
    max_draft: int,
) -> None:
    """Fill `rows`, `totals` (tokens and groups of the step) and `curve`; advance `step` modulo `ring`.

    found:      of `find_drafts`; lengths as there.
    row_rates:  (slots, 2) draft tokens that were right and that were tried.
    kind_rates: the same by kind of match; drawn to `priors` a little.
    rows:       (>= R, NUM_ROW_FIELDS) int64.
    curve:      (2 * NUM_LEVELS + 1,) for each level how many draft tokens are as likely, and how many of them are expected to be
                right; last the number of active sequences.
    budget:     tokens of the step, at least one per active sequence; 0 for the curve alone.
    """
    _allot[(1,)](
        found, slot_state, slot_ids, lengths, row_rates, kind_rates, priors, rows, totals, curve, step,
        len(slot_ids), budget, ring, slot_state.stride(0), max_draft, triton.next_power_of_2(len(rows)), num_warps=4
    )  # fmt: skip


def fill(
    rows: Tensor,
    totals: Tensor,
    texts: Tensor,
    slot_state: Tensor,
    slot_options: Tensor,
    slot_ids: Tensor,
    tables: Tensor,
    rope_deltas: Tensor | None,
    inputs: Tensor,
    row_state: Tensor,
    row_options: Tensor,
    group_starts: Tensor,
    *,
    size: int,
    block_size: int,
    max_draft: int,
) -> None:
    """Fill `size` rows of the model's inputs and of the state that samples them, and the groups of rows of `draft_attention`.

    inputs:                  (NUM_INPUTS, >= size).
    row_state, row_options:  like `slot_state` and `slot_options`, per token.
    group_starts:            (P + 1,) with P groups or fewer.
    """
    num_rows, num_groups = len(slot_ids), len(group_starts) - 1
    width = max(32, triton.next_power_of_2(1 + max_draft))
    _fill[(num_rows + triton.cdiv(max(size, num_groups + 1), width),)](
        rows, totals, texts, slot_state, slot_options, slot_ids, tables, rope_deltas,
        inputs, row_state, row_options, group_starts,
        num_rows, size, num_groups, inputs.stride(0), tables.stride(0), len(slot_state) - 1,
        slot_state.stride(0), row_state.stride(0), block_size, width, num_warps=1
    )  # fmt: skip


def accept(
    rows: Tensor,
    slot_ids: Tensor,
    slot_state: Tensor,
    inputs: Tensor,
    sampled: Tensor,
    log_probs: Tensor,
    texts: Tensor,
    lengths: Tensor,
    row_rates: Tensor,
    kind_rates: Tensor,
    step: Tensor,
    out_tokens: Tensor,
    out_log_probs: Tensor,
    out_drafted: Tensor,
    *,
    width: int,
) -> None:
    """Keep the tokens of each sequence up to the first that differs from its draft or stops it.

    sampled, log_probs: of all rows of the step.
    width:              places of a slot's text.
    out_tokens:         (ring, slots, 1 + most drafts) the kept tokens, then -1; out_log_probs: theirs, then anything.
    out_drafted:        (ring, slots) draft tokens that were computed.
    """
    num_outputs = out_tokens.shape[2]
    _accept[(len(slot_ids),)](
        rows, slot_ids, slot_state, inputs, sampled, log_probs, texts, lengths, row_rates, kind_rates, step,
        out_tokens, out_log_probs, out_drafted, out_tokens.shape[1], num_outputs, width, inputs.stride(0),
        slot_state.stride(0), slot_state.shape[1] - sampling.STOPS, max(32, triton.next_power_of_2(num_outputs)),
        num_warps=1
    )  # fmt: skip


def append(slot_ids: Tensor, sampled: Tensor, num_steps: int, texts: Tensor, lengths: Tensor, *, width: int) -> None:
    """Append what plain steps sampled, (>= num_steps, slots) with -1 after a sequence's end, to the texts of the slots."""
    _append[(len(slot_ids),)](slot_ids, sampled, texts, lengths, num_steps, sampled.shape[1], width, num_warps=1)
