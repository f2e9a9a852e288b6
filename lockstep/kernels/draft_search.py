"""Search for drafts: for each decoding sequence, the longest match of its last tokens in other texts.

    texts of a prompt (segments) ─► per row and share of the segments: the best match ─► `draft_rows.allot`

A text is an answer, with `MAX_MATCH` times `START` before it, so that matches that reach back to the start of both count as the
longest. The texts of decoding sequences grow in place: sequence in slot s has its tokens from s * width + MAX_MATCH on.

Of several matches the longest counts, then the one that most tokens follow, up to the longest draft, then the latest segment and
place. A match is one int64 with these in its digits, so the best one is the largest:

    | match: 5 bits | following tokens: 10 | segment: 8 | place of the first following token: 32 |
"""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import sampling
from lockstep.kernels.draft_settings import MAX_MATCH

LIVE = -1
"""Stands for the end of a segment that still grows."""
MAX_FOLLOWING = 1023
"""Most tokens of a draft."""
MAX_SEGMENTS = 64
"""Texts of a prompt that are searched."""
LANES = 8
"""Programs per row, which divide the segments among themselves."""

PLACE_BITS, SEGMENT_BITS, FOLLOWING_BITS = 32, 8, 10

_MAX_MATCH, _MAX_SEGMENTS, _LANES = tl.constexpr(MAX_MATCH), tl.constexpr(MAX_SEGMENTS), tl.constexpr(LANES)
_PLACE_BITS, _SEGMENT_BITS = tl.constexpr(PLACE_BITS), tl.constexpr(SEGMENT_BITS)
_FOLLOWING_BITS = tl.constexpr(FOLLOWING_BITS)
_ACTIVE = tl.constexpr(sampling.ACTIVE)


@triton.jit(do_not_specialize=["width"])
def _find(
    texts_ptr, lengths_ptr, segments_ptr, state_ptr, slot_ids_ptr, found_ptr, width,
    FIELDS: tl.constexpr, MAX_DRAFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, lane = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    best = tl.zeros([], tl.int64)
    if tl.load(state_ptr + slot * FIELDS + _ACTIVE) != 0:
        own_end = slot * width + _MAX_MATCH + tl.load(lengths_ptr + slot)
        newest = tl.load(texts_ptr + own_end - 1)
        for segment in range(lane, _MAX_SEGMENTS, _LANES):
            at_segment = segments_ptr + (slot * _MAX_SEGMENTS + segment) * 2
            first = tl.load(at_segment)
            stop = tl.load(at_segment + 1)
            grows = stop < 0
            length = tl.load(lengths_ptr + tl.where(grows, first, 0)).to(tl.int64)
            first = tl.where(grows, first * width + _MAX_MATCH, first)
            stop = tl.where(grows, first + length, stop)
            for at in range(first, stop, BLOCK):
                place = at + tl.arange(0, BLOCK)
                same = (place < stop) & (tl.load(texts_ptr + place - 1, mask=place < stop, other=-2) == newest)
                match = same.to(tl.int64)
                i = tl.full([], 1, tl.int32)
                goes_on = tl.max(match, 0)
                while goes_on > 0:
                    wanted = tl.load(texts_ptr + own_end - 1 - i)
                    same = same & (tl.load(texts_ptr + place - 1 - i, mask=same, other=-2) == wanted)
                    match += same.to(tl.int64)
                    i += 1
                    goes_on = tl.where(i < _MAX_MATCH, tl.max(same.to(tl.int64), 0), 0)
                following = tl.minimum(stop - place, MAX_DRAFT)
                key = (match << _FOLLOWING_BITS) + following
                key = (((key << _SEGMENT_BITS) + segment) << _PLACE_BITS) + place
                best = tl.maximum(best, tl.max(tl.where(match > 0, key, 0), 0))
    tl.store(found_ptr + row * _LANES + lane, best)


def find_drafts(
    texts: Tensor,
    lengths: Tensor,
    segments: Tensor,
    slot_state: Tensor,
    slot_ids: Tensor,
    found: Tensor,
    *,
    width: int,
    max_draft: int,
) -> None:
    """Fill found (>= R, LANES) with the best match of each share of a row's segments, 0 for none.

    texts:    int32, the texts of the slots, `width` tokens each, then others.
    lengths:  (slots,) tokens of each slot's text.
    segments: (slots, MAX_SEGMENTS, 2) int64, what the sequence in a slot drafts from: first place and end, or a slot and LIVE.
    slot_ids: (R,) slot of each row; rows of inactive slots find nothing.
    """
    _find[(len(slot_ids), LANES)](
        texts, lengths, segments, slot_state, slot_ids, found, width,
        slot_state.stride(0), min(max_draft, MAX_FOLLOWING), 1024, num_warps=4
    )  # fmt: skip
