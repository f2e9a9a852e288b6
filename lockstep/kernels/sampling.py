"""Sampling on the GPU, and the state of the sequences that decode there.

    begin_step:  slot state ─► token, position and cache slot of every row
    thresholds:  min-p, top-k, top-p ─► the smallest logit that may be sampled
    sum_tiles:   per tile of the vocabulary: maximum, sum of weights, sum of the weights above the threshold
    pick_token:  inverse CDF at uniform(seed, position) over token ids ─► token, log-prob; update the slot state

A decode slot holds one sequence: a row of `slot_state` (int64) and a row of `slot_options` (float32), fields below. Each row of a
step has a slot id. Rows are independent, so a sampled token depends only on its logits, seed and position.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITION, ACTIVE, SEED, LAST, TOKEN, TOP_K, STOPS = range(7)
"""Fields of `slot_state`: position of the next input token; 1 while decoding; seed; position of the last token that may be sampled;
the next input token; top-k (0: all); from here on stop tokens (-1: none)."""

MIN_STOPS = 4
"""Least number of stop tokens that a row has room for."""

TEMPERATURE, TOP_P, MIN_P, NUM_OPTIONS = range(4)
"""Fields of `slot_options`, and their number."""

TILE = 4096
"""Vocabulary entries per program."""

_POSITION, _ACTIVE, _SEED = tl.constexpr(POSITION), tl.constexpr(ACTIVE), tl.constexpr(SEED)
_LAST, _TOKEN, _TOP_K, _STOPS = tl.constexpr(LAST), tl.constexpr(TOKEN), tl.constexpr(TOP_K), tl.constexpr(STOPS)
_TOP_P, _MIN_P, _NUM_OPTIONS = tl.constexpr(TOP_P), tl.constexpr(MIN_P), tl.constexpr(NUM_OPTIONS)


@triton.jit(do_not_specialize=["num_rows", "table_width"])
def _begin_step(
    state_ptr, tables_ptr, slot_ids_ptr, tokens_ptr, positions_ptr, cache_slots_ptr, step_ptr,
    num_rows, table_width, ring, FIELDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(slot_ids_ptr + row, mask=inside, other=0).to(tl.int64)
    fields = state_ptr + slot * FIELDS
    active = tl.load(fields + _ACTIVE, mask=inside, other=0) != 0
    position = tl.load(fields + _POSITION, mask=active, other=0)
    token = tl.load(fields + _TOKEN, mask=active, other=0)
    block = tl.load(tables_ptr + slot * table_width + position // BLOCK_SIZE, mask=active, other=0).to(tl.int64)
    cache_slot = tl.where(active, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(cache_slots_ptr + row, cache_slot, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(step_ptr, (tl.load(step_ptr) + 1) % ring)


def begin_step(
    slot_state: Tensor,
    tables: Tensor,
    slot_ids: Tensor,
    tokens: Tensor,
    positions: Tensor,
    cache_slots: Tensor,
    step: Tensor,
    *,
    ring: int,
    block_size: int,
) -> None:
    """Fill tokens, positions and cache_slots (T,) from the slots `slot_ids` (T,); advance `step` modulo `ring`."""
    rows = 128
    _begin_step[(triton.cdiv(len(slot_ids), rows),)](
        slot_state, tables, slot_ids, tokens, positions, cache_slots, step,
        len(slot_ids), tables.stride(0), ring, slot_state.stride(0), block_size, rows
    )  # fmt: skip


@triton.jit
def _rank(x):
    """int64 >= 0 in the order of the float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _thresholds(
    logits_ptr, state_ptr, options_ptr, slot_ids_ptr, thresholds_ptr, stride, vocabulary,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The smallest logit to keep: among those that min-p and top-k keep, the largest from which the weights sum up to top-p.

    The thresholds of top-k and top-p are found in base 16 of the logits' rank, one digit per pass over the row.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    temperature = tl.load(options_ptr + slot * _NUM_OPTIONS)
    top_p = tl.load(options_ptr + slot * _NUM_OPTIONS + _TOP_P)
    min_p = tl.load(options_ptr + slot * _NUM_OPTIONS + _MIN_P)
    top_k = tl.load(state_ptr + slot * FIELDS + _TOP_K)
    x_ptr = logits_ptr + row * stride
    digits = tl.arange(0, 16).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    threshold = tl.zeros([], tl.int64)
    if (temperature > 0) & (top_k > 0) & (top_k < vocabulary):
        for i in range(8):
            candidates = threshold + (digits << (28 - 4 * i))
            counts = tl.zeros([16], tl.int32)
            for at in range(0, vocabulary, BLOCK):
                inside = at + offsets < vocabulary
                rank = _rank(tl.load(x_ptr + at + offsets, mask=inside, other=-float("inf")).to(tl.float32))
                counts += tl.sum(((rank[:, None] >= candidates[None, :]) & inside[:, None]).to(tl.int32), 0)
            threshold = tl.max(tl.where(counts >= top_k, candidates, threshold), 0)
    top = tl.full([], -float("inf"), tl.float32)
    if (temperature > 0) & ((top_p < 1.0) | (min_p > 0)):
        for at in range(0, vocabulary, BLOCK):
            x = tl.load(x_ptr + at + offsets, mask=at + offsets < vocabulary, other=-float("inf")).to(tl.float32)
            top = tl.maximum(top, tl.max(x, 0))
    if (temperature > 0) & (min_p > 0):
        threshold = tl.maximum(threshold, _rank(top + temperature * tl.log(min_p)))
    if (temperature > 0) & (top_p < 1.0):
        total = tl.zeros([], tl.float32)
        for at in range(0, vocabulary, BLOCK):
            x = tl.load(x_ptr + at + offsets, mask=at + offsets < vocabulary, other=-float("inf")).to(tl.float32)
            total += tl.sum(tl.where(_rank(x) >= threshold, tl.exp((x - top) / temperature), 0.0), 0)
        least, threshold = threshold, tl.zeros([], tl.int64)
        for i in range(8):
            candidates = threshold + (digits << (28 - 4 * i))
            masses = tl.zeros([16], tl.float32)
            for at in range(0, vocabulary, BLOCK):
                x = tl.load(x_ptr + at + offsets, mask=at + offsets < vocabulary, other=-float("inf")).to(tl.float32)
                rank = _rank(x)
                weight = tl.where(rank >= least, tl.exp((x - top) / temperature), 0.0)
                masses += tl.sum(tl.where(rank[:, None] >= candidates[None, :], weight[:, None], 0.0), 0)
            threshold = tl.max(tl.where(masses >= top_p * total, candidates, threshold), 0)
        threshold = tl.maximum(threshold, least)
    bits = (threshold - 2147483648).to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(thresholds_ptr + row, tl.where(threshold > 0, value, -float("inf")))


@triton.jit
def _sum_tiles(
    logits_ptr, options_ptr, slot_ids_ptr, thresholds_ptr, sums_ptr, best_ptr, stride, vocabulary,
    FILTERED: tl.constexpr, NUM_TILES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = tl.load(options_ptr + tl.load(slot_ids_ptr + row).to(tl.int64) * _NUM_OPTIONS)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    at = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    x = logits / temperature
    top = tl.max(x, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp(x - base)
    place = row * NUM_TILES + tile
    tl.store(sums_ptr + place * 3, top)
    tl.store(sums_ptr + place * 3 + 1, tl.sum(weights, 0))
    if FILTERED:
        weights = tl.where(logits >= tl.load(thresholds_ptr + row), weights, 0.0)
        tl.store(sums_ptr + place * 3 + 2, tl.sum(weights, 0))
    if greedy:
        tl.store(best_ptr + place, tile * TILE + tl.argmax(x, 0))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """24 random bits from (seed, position) by splitmix64."""
    golden = 0x9E3779B97F4A7C15
    state = _mix(seed.to(tl.uint64) + golden) + (position + 1).to(tl.uint64) * golden
    return (_mix(state) >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _pick_token(
    logits_ptr, excluded_ptr, state_ptr, options_ptr, slot_ids_ptr, thresholds_ptr, sums_ptr, best_ptr, step_ptr,
    out_tokens_ptr, out_log_probs_ptr, out_width, stride, vocabulary,
    FILTERED: tl.constexpr, FIELDS: tl.constexpr, NUM_STOPS: tl.constexpr,
    NUM_TILES: tl.constexpr, NUM_TILES_PADDED: tl.constexpr, TILE: tl.constexpr, NUM_EXCLUDED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    fields = state_ptr + slot * FIELDS
    out = tl.load(step_ptr).to(tl.int64) * out_width + slot
    if tl.load(fields + _ACTIVE) == 0:
        tl.store(out_tokens_ptr + out, -1)
        return
    position = tl.load(fields + _POSITION) + 1
    temperature = tl.load(options_ptr + slot * _NUM_OPTIONS)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)

    tile = tl.arange(0, NUM_TILES_PADDED)
    inside = tile < NUM_TILES
    sums_ptr += (row * NUM_TILES + tile) * 3
    tops = tl.load(sums_ptr, mask=inside, other=-float("inf"))
    top = tl.max(tops, 0)
    factor = tl.exp(tops - top)
    sums = tl.load(sums_ptr + 1, mask=inside, other=0.0) * factor
    total = tl.sum(sums, 0)
    if FILTERED:
        sums = tl.load(sums_ptr + 2, mask=inside, other=0.0) * factor
        threshold = tl.load(thresholds_ptr + row)
    running = tl.cumsum(sums, 0)
    kept = tl.max(running, 0)
    target = _uniform(tl.load(fields + _SEED), position) * kept
    last = tl.max(tl.where(sums > 0, tile, 0), 0)
    chosen = tl.minimum(tl.min(tl.where(running > target, tile, NUM_TILES_PADDED), 0), last)
    before = tl.sum(tl.where(tile < chosen, sums, 0.0), 0)

    at = chosen * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    weights = tl.exp(logits / temperature - top)
    if FILTERED:
        weights = tl.where(logits >= threshold, weights, 0.0)
    passed = before + tl.cumsum(weights, 0)
    end = vocabulary + TILE
    found = tl.min(tl.where((passed > target) & (weights > 0), at, end), 0)
    fallback = tl.max(tl.where(weights > 0, at, 0), 0)  # rounding may push the target past the tile's sum
    token = tl.where(found < end, found, fallback).to(tl.int64)
    if greedy:
        best_tile = tl.min(tl.where(tops == top, tile, NUM_TILES_PADDED), 0)
        token = tl.load(best_ptr + row * NUM_TILES + best_tile).to(tl.int64)

    logit = tl.load(logits_ptr + row * stride + token).to(tl.float32)
    tl.store(out_tokens_ptr + out, token.to(tl.int32))
    if NUM_EXCLUDED > 0:
        excluded = tl.load(excluded_ptr + row * NUM_EXCLUDED + tl.arange(0, NUM_EXCLUDED)) / temperature
        highest = tl.maximum(top, tl.max(excluded, 0))
        total = total * tl.exp(top - highest) + tl.sum(tl.exp(excluded - highest), 0)
        top = highest
    tl.store(out_log_probs_ptr + out, logit / temperature - top - tl.log(total))
    stop = tl.arange(0, NUM_STOPS)
    stopped = tl.max((tl.load(fields + _STOPS + stop) == token).to(tl.int32), 0) > 0
    done = stopped | (position >= tl.load(fields + _LAST))
    tl.store(fields + _POSITION, position)
    tl.store(fields + _TOKEN, token)
    tl.store(fields + _ACTIVE, tl.where(done, 0, 1).to(tl.int64))


def sample(
    logits: Tensor,
    slot_state: Tensor,
    slot_options: Tensor,
    slot_ids: Tensor,
    step: Tensor,
    out_tokens: Tensor,
    out_log_probs: Tensor,
    *,
    filtered: bool,
    excluded: Tensor | None = None,
) -> None:
    """Sample one token per row of logits (T, V) and update the slots.

    Tokens and log-probs go to row `step` of the outputs (ring, slots); an inactive slot gets token -1.
    filtered: whether any row has min-p, top-k or top-p. Tokens whose logit equals the threshold are all kept.
    excluded: tokens that are never sampled: their logits become -inf in place. Log-probs are those of the full distribution.
    """
    rows, vocabulary = logits.shape
    excluded_logits = None
    num_excluded = 0
    if excluded is not None:
        num_excluded = max(2, triton.next_power_of_2(len(excluded)))
        excluded_logits = logits.new_full((rows, num_excluded), float("-inf"), dtype=torch.float32)
        excluded_logits[:, : len(excluded)] = logits.index_select(1, excluded)
        logits.index_fill_(1, excluded, float("-inf"))
    thresholds = None
    if filtered:
        thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
        _thresholds[(rows,)](
            logits, slot_state, slot_options, slot_ids, thresholds, logits.stride(0), vocabulary,
            slot_state.stride(0), 1024, num_warps=8
        )  # fmt: skip
    num_tiles = triton.cdiv(vocabulary, TILE)
    sums = torch.empty(rows, num_tiles, 3, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, num_tiles, dtype=torch.int32, device=logits.device)
    _sum_tiles[(rows, num_tiles)](
        logits, slot_options, slot_ids, thresholds, sums, best, logits.stride(0), vocabulary,
        filtered, num_tiles, TILE, num_warps=8
    )  # fmt: skip
    _pick_token[(rows,)](
        logits, excluded_logits, slot_state, slot_options, slot_ids, thresholds, sums, best, step,
        out_tokens, out_log_probs, out_tokens.stride(0), logits.stride(0), vocabulary,
        filtered, slot_state.stride(0), slot_state.shape[1] - STOPS,
        num_tiles, triton.next_power_of_2(num_tiles), TILE, num_excluded, num_warps=8
    )  # fmt: skip
