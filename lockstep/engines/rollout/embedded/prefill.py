"""The rows of a prefill step as tensors: token ids, positions, cache slots and block tables."""

from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.paged_attention import CachedRows, PagedAttention, PagedCache
from lockstep.engines.rollout.embedded.prompt_images import ImageChunk
from lockstep.engines.rollout.embedded.scheduler import PrefillRow
from lockstep.engines.rollout.embedded.state_slots import PrefillStates, RowGroup, StateSlots
from lockstep.utils.device import to_device


class PrefillInputs:
    """The inputs of one forward pass.

    token_ids, position_ids: (1, T); positions (3, 1, T) if images give some of them.
    attention:               what each token attends to.
    samplers:                the N sequences that sample in this step.
    last_token_index:        (N,) the token in 0..T whose logits each of them samples from.
    rows:                    in the order of their tokens.
    images:                  in the order of the tokens: images, and which of their features (start, stop) are among these tokens.
    """

    def __init__(self, rows: list[PrefillRow], cache: PagedCache) -> None:
        size = cache.block_size
        device = cache.device
        rows = self.rows = sorted(rows, key=lambda row: (row.start == 0, _shape(row)))  # as `PagedAttention` expects
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        for row in rows:
            blocks = row.sequence.blocks
            new = range(row.start, row.stop)
            tokens += row.tokens
            positions += new
            slots += [blocks[p // size] * size + p % size for p in new]
            last += [len(tokens) - 1] * len(row.samplers)
        self.token_ids, self.position_ids = _upload([tokens], device), _upload([positions], device)
        if any(row.sequence.images is not None and row.sequence.images.positions is not None for row in rows):
            rotary = np.concatenate([_rotary(row) for row in rows], 1)[:, None]
            self.position_ids = to_device(torch.from_numpy(rotary), device)
        self.images = [chunk for row in rows if (chunk := _image_chunk(row)) is not None]
        self.samplers = [s for row in rows for s in row.samplers]
        self.last_token_index = _upload(last, device)
        fresh = [row.stop - row.start for row in rows if row.start == 0]
        cached = _cached_rows([row for row in rows if row.start > 0], device)
        states = None if cache.states is None else PrefillStates(cache.states, _row_groups(rows, cache.states))
        self.attention = PagedAttention(cache, _upload(slots, device), cached, fresh, states)


def _shape(row: PrefillRow) -> tuple[int, int]:
    """Rows of one shape attend in one call: as many new tokens, and block tables padded by less than a factor of 2."""
    return row.stop - row.start, len(row.sequence.blocks).bit_length()


def _rotary(row: PrefillRow) -> np.ndarray:
    """(3, tokens of the row)."""
    if row.sequence.images is not None:
        return row.sequence.images.rotary(row.start, row.stop)
    return np.broadcast_to(np.arange(row.start, row.stop), (3, row.stop - row.start))


def _image_chunk(row: PrefillRow) -> ImageChunk | None:
    images = row.sequence.images
    start, stop = (0, 0) if images is None else images.feature_range(row.start, row.stop)
    return None if images is None or start == stop else (images, start, stop)


def _cached_rows(rows: list[PrefillRow], device: torch.device) -> list[CachedRows]:
    result = []
    first = 0
    for (num_new, _), group in groupby(rows, key=_shape):
        same = list(group)
        tables = [row.sequence.blocks for row in same]
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        positions = [list(range(row.start, row.stop)) for row in same]
        result.append(CachedRows(first, _upload(padded, device), _upload(positions, device)))
        first += num_new * len(same)
    return result


def _row_groups(rows: list[PrefillRow], store: StateSlots) -> list[RowGroup]:
    result = []
    first = 0
    for (is_fresh, length), group in groupby(rows, key=lambda row: (row.start == 0, row.stop - row.start)):
        slots = [row.sequence.state_slot for row in group]
        assert None not in slots, "a sequence has no state slot"
        result.append(RowGroup(first, length, _upload(slots, store.device), is_fresh))  # type: ignore[arg-type]
        first += length * len(slots)
    return result


def _upload(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    array = np.array(values, dtype=np.int64)  # numpy converts long lists several times faster than torch
    return to_device(torch.from_numpy(array), device)
