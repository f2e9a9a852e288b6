"""Drawing tokens on the device, and the bookkeeping of the sequences that draw.

    begin:  seats ─► token, position and cache slot of every row
    floors: min-p, top-k and top-p ─► the least logit that may be drawn
    sums:   per stretch of the vocabulary: maximum, sum of weights, sum of the weights that may be drawn
    draw:   inverse CDF at uniform(seed, position) over token ids ─► token, log-prob; stop tokens and lengths end the sequence

A seat holds one sequence: a row of `state` (int64, fields below) and of `options` (float32, likewise). Rows of a step
name their seats. Nothing here depends on the other rows, so a draw depends on its logits, seed and position alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITION, ACTIVE, SEED, LAST, TOKEN, TOP_K, STOPS = range(7)
"""Fields of a seat: place of the token to be computed next; 1 while it draws; seed; place of the last token that it may draw; the
token to be computed next; top-k (0: all); from here on stop tokens (-1: none)."""

TEMPERATURE, TOP_P, MIN_P, OPTIONS = range(4)
"""Options of a seat, and how many they are."""

STRETCH = 4096
"""Entries of the vocabulary that a program takes."""

_POSITION = tl.constexpr(POSITION)
_ACTIVE = tl.constexpr(ACTIVE)
_SEED = tl.constexpr(SEED)
_LAST = tl.constexpr(LAST)
_TOKEN = tl.constexpr(TOKEN)
_TOP_K = tl.constexpr(TOP_K)
_STOPS = tl.constexpr(STOPS)
_TOP_P = tl.constexpr(TOP_P)
_MIN_P = tl.constexpr(MIN_P)
_OPTIONS = tl.constexpr(OPTIONS)


@triton.jit(do_not_specialize=["num_rows", "table_width"])
def _begin(
    state_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    step_ptr: tl.tensor,
    num_rows: tl.tensor,
    table_width: tl.tensor,
    ring: tl.tensor,
    FIELDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    seat = tl.load(seats_ptr + row, mask=inside, other=0).to(tl.int64)
    fields = state_ptr + seat * FIELDS
    active = tl.load(fields + _ACTIVE, mask=inside, other=0) != 0
    position = tl.load(fields + _POSITION, mask=active, other=0)
    token = tl.load(fields + _TOKEN, mask=active, other=0)
    block = tl.load(tables_ptr + seat * table_width + position // BLOCK_SIZE, mask=active, other=0).to(tl.int64)
    slot = tl.where(active, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(slots_ptr + row, slot, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(step_ptr, (tl.load(step_ptr) + 1) % ring)


def begin_step(
    state: Tensor,
    tables: Tensor,
    seats: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    step: Tensor,
    *,
    ring: int,
    block_size: int,
) -> None:
    """Fill tokens, positions and slots (T,) of the rows from their seats (T,), and count `step` on in a ring."""
    block = 128
    _begin[(triton.cdiv(len(seats), block),)](
        state,
        tables,
        seats,
        tokens,
        positions,
        slots,
        step,
        len(seats),
        tables.stride(0),
        ring,
        state.stride(0),
        block_size,
        block,
    )


@triton.jit
def _rank(x: tl.tensor) -> tl.tensor:
    """int64 in the order of the floats, from 0 on."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _floors(
    logits_ptr: tl.tensor,
    state_ptr: tl.tensor,
    options_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    floors_ptr: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The least logit to keep: of those that min-p and top-k leave in, the largest one from which on the weights reach top-p.

    That of top-k and top-p is found digit by digit in base 16 of the logits' rank: each pass over the row settles one digit.
    """
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats_ptr + row).to(tl.int64)
    temperature = tl.load(options_ptr + seat * _OPTIONS)
    top_p = tl.load(options_ptr + seat * _OPTIONS + _TOP_P)
    min_p = tl.load(options_ptr + seat * _OPTIONS + _MIN_P)
    top_k = tl.load(state_ptr + seat * FIELDS + _TOP_K)
    x_ptr = logits_ptr + row * stride
    digits = tl.arange(0, 16).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    floor = tl.zeros([], tl.int64)
    if (temperature > 0) & (top_k > 0) & (top_k < vocabulary):
        for i in range(8):
            candidates = floor + (digits << (28 - 4 * i))
            counts = tl.zeros([16], tl.int32)
            for at in range(0, vocabulary, BLOCK):
                inside = at + offsets < vocabulary
                rank = _rank(tl.load(x_ptr + at + offsets, mask=inside, other=-float("inf")).to(tl.float32))
                counts += tl.sum(((rank[:, None] >= candidates[None, :]) & inside[:, None]).to(tl.int32), 0)
            floor = tl.max(tl.where(counts >= top_k, candidates, floor), 0)
    top = tl.full([], -float("inf"), tl.float32)
    if (temperature > 0) & ((top_p < 1.0) | (min_p > 0)):
        for at in range(0, vocabulary, BLOCK):
            x = tl.load(x_ptr + at + offsets, mask=at + offsets < vocabulary, other=-float("inf")).to(tl.float32)
            top = tl.maximum(top, tl.max(x, 0))
    if (temperature > 0) & (min_p > 0):
        floor = tl.maximum(floor, _rank(top + temperature * tl.log(min_p)))
    if (temperature > 0) & (top_p < 1.0):
        total = tl.zeros([], tl.float32)
        for at in range(0, vocabulary, BLOCK):
            x = tl.load(x_ptr + at + offsets, mask=at + offsets < vocabulary, other=-float("inf")).to(tl.float32)
            total += tl.sum(tl.where(_rank(x) >= floor, tl.exp((x - top) / temperature), 0.0), 0)
        least, floor = floor, tl.zeros([], tl.int64)
        for i in range(8):
            candidates = floor + (digits << (28 - 4 * i))
            masses = tl.zeros([16], tl.float32)
            for at in range(0, vocabulary, BLOCK):
                x = tl.load(x_ptr + at + offsets, mask=at + offsets < vocabulary, other=-float("inf")).to(tl.float32)
                rank = _rank(x)
                weight = tl.where(rank >= least, tl.exp((x - top) / temperature), 0.0)
                masses += tl.sum(tl.where(rank[:, None] >= candidates[None, :], weight[:, None], 0.0), 0)
            floor = tl.max(tl.where(masses >= top_p * total, candidates, floor), 0)
        floor = tl.maximum(floor, least)
    bits = (floor - 2147483648).to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(floors_ptr + row, tl.where(floor > 0, value, -float("inf")))


@triton.jit
def _sums(
    logits_ptr: tl.tensor,
    options_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    floors_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    best_ptr: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    FILTERED: tl.constexpr,
    STRETCHES: tl.constexpr,
    STRETCH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(options_ptr + tl.load(seats_ptr + row).to(tl.int64) * _OPTIONS)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    at = part * STRETCH + tl.arange(0, STRETCH)
    logits = tl.load(logits_ptr + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    x = logits / temperature
    top = tl.max(x, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp(x - base)
    place = row * STRETCHES + part
    tl.store(stats_ptr + place * 3, top)
    tl.store(stats_ptr + place * 3 + 1, tl.sum(weights, 0))
    if FILTERED:
        weights = tl.where(logits >= tl.load(floors_ptr + row), weights, 0.0)
        tl.store(stats_ptr + place * 3 + 2, tl.sum(weights, 0))
    if greedy:
        tl.store(best_ptr + place, part * STRETCH + tl.argmax(x, 0))


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """24 random bits of (seed, position): splitmix64."""
    golden = 0x9E3779B97F4A7C15
    state = _mix(seed.to(tl.uint64) + golden) + (position + 1).to(tl.uint64) * golden
    return (_mix(state) >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _draw(
    logits_ptr: tl.tensor,
    state_ptr: tl.tensor,
    options_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    floors_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    best_ptr: tl.tensor,
    step_ptr: tl.tensor,
    out_tokens_ptr: tl.tensor,
    out_log_probs_ptr: tl.tensor,
    out_width: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    FILTERED: tl.constexpr,
    FIELDS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    STRETCHES: tl.constexpr,
    STRETCHES_PADDED: tl.constexpr,
    STRETCH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats_ptr + row).to(tl.int64)
    fields = state_ptr + seat * FIELDS
    out = tl.load(step_ptr).to(tl.int64) * out_width + seat
    if tl.load(fields + _ACTIVE) == 0:
        tl.store(out_tokens_ptr + out, -1)
        return
    position = tl.load(fields + _POSITION) + 1
    temperature = tl.load(options_ptr + seat * _OPTIONS)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)

    part = tl.arange(0, STRETCHES_PADDED)
    inside = part < STRETCHES
    stats = stats_ptr + (row * STRETCHES + part) * 3
    tops = tl.load(stats, mask=inside, other=-float("inf"))
    top = tl.max(tops, 0)
    factor = tl.exp(tops - top)
    sums = tl.load(stats + 1, mask=inside, other=0.0) * factor
    total = tl.sum(sums, 0)
    if FILTERED:
        sums = tl.load(stats + 2, mask=inside, other=0.0) * factor
        floor = tl.load(floors_ptr + row)
    running = tl.cumsum(sums, 0)
    kept = tl.max(running, 0)
    target = _uniform(tl.load(fields + _SEED), position) * kept
    last = tl.max(tl.where(sums > 0, part, 0), 0)
    chosen = tl.minimum(tl.min(tl.where(running > target, part, STRETCHES_PADDED), 0), last)
    before = tl.sum(tl.where(part < chosen, sums, 0.0), 0)

    at = chosen * STRETCH + tl.arange(0, STRETCH)
    logits = tl.load(logits_ptr + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    weights = tl.exp(logits / temperature - top)
    if FILTERED:
        weights = tl.where(logits >= floor, weights, 0.0)
    passed = before + tl.cumsum(weights, 0)
    end = vocabulary + STRETCH
    found = tl.min(tl.where((passed > target) & (weights > 0), at, end), 0)
    fallback = tl.max(tl.where(weights > 0, at, 0), 0)  # rounding may carry the target past the stretch's sum
    token = tl.where(found < end, found, fallback).to(tl.int64)
    if greedy:
        where_top = tl.min(tl.where(tops == top, part, STRETCHES_PADDED), 0)
        token = tl.load(best_ptr + row * STRETCHES + where_top).to(tl.int64)

    logit = tl.load(logits_ptr + row * stride + token).to(tl.float32)
    tl.store(out_tokens_ptr + out, token.to(tl.int32))
    tl.store(out_log_probs_ptr + out, logit / temperature - top - tl.log(total))
    stop = tl.arange(0, NUM_STOPS)
    stopped = tl.max((tl.load(fields + _STOPS + stop) == token).to(tl.int32), 0) > 0
    done = stopped | (position >= tl.load(fields + _LAST))
    tl.store(fields + _POSITION, position)
    tl.store(fields + _TOKEN, token)
    tl.store(fields + _ACTIVE, tl.where(done, 0, 1).to(tl.int64))


def scratch(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Room for what `sum_stretches` tells `pick`."""
    rows, stretches = len(logits), triton.cdiv(logits.shape[1], STRETCH)
    stats = torch.empty(rows, stretches, 3, dtype=torch.float32, device=logits.device)
    return stats, torch.empty(rows, stretches, dtype=torch.int32, device=logits.device)


def sum_stretches(
    logits: Tensor, options: Tensor, seats: Tensor, floors: Tensor | None, stats: Tensor, best: Tensor
) -> None:
    """Fill stats and best. floors: (T,) the least logit of each row that may be drawn; None if all may."""
    rows, vocabulary = logits.shape
    stretches = best.shape[1]
    _sums[(rows, stretches)](
        logits,
        options,
        seats,
        floors,
        stats,
        best,
        logits.stride(0),
        vocabulary,
        floors is not None,
        stretches,
        STRETCH,
        num_warps=8,
    )


def pick(
    logits: Tensor,
    state: Tensor,
    options: Tensor,
    seats: Tensor,
    floors: Tensor | None,
    stats: Tensor,
    best: Tensor,
    step: Tensor,
    out_tokens: Tensor,
    out_log_probs: Tensor,
) -> None:
    """Draw by the sums of the stretches, and move the seats on."""
    rows, vocabulary = logits.shape
    stretches = best.shape[1]
    _draw[(rows,)](
        logits,
        state,
        options,
        seats,
        floors,
        stats,
        best,
        step,
        out_tokens,
        out_log_probs,
        out_tokens.stride(0),
        logits.stride(0),
        vocabulary,
        floors is not None,
        state.stride(0),
        state.shape[1] - STOPS,
        stretches,
        triton.next_power_of_2(stretches),
        STRETCH,
        num_warps=8,
    )


def draw(
    logits: Tensor,
    state: Tensor,
    options: Tensor,
    seats: Tensor,
    step: Tensor,
    out_tokens: Tensor,
    out_log_probs: Tensor,
    *,
    filtered: bool,
) -> None:
    """Draw one token from each row of logits (T, V), write it and its log-prob to row `step` of the outputs (ring, seats), and move
    the seats on. A seat that is not active gets -1.

    filtered: whether any row has min-p, top-k or top-p. Tokens whose logit equals the least one kept are all kept.
    """
    rows, vocabulary = logits.shape
    floors = None
    if filtered:
        floors = torch.empty(rows, dtype=torch.float32, device=logits.device)
        _floors[(rows,)](
            logits, state, options, seats, floors, logits.stride(0), vocabulary, state.stride(0), 1024, num_warps=8
        )
    stats, best = scratch(logits)
    sum_stretches(logits, options, seats, floors, stats, best)
    pick(logits, state, options, seats, floors, stats, best, step, out_tokens, out_log_probs)
