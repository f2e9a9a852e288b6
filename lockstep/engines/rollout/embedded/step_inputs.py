"""The rows of a step of prompts as tensors: ids, positions, cache slots and block tables."""

import numpy as np
import torch

from lockstep.engines.rollout.embedded.scheduler import Row
from lockstep.models.paged_attention import CachedRows, PagedAttention, PagedCache
from lockstep.utils.device import to_device


class StepInputs:
    """The tensors of one forward pass.

    token_ids, position_ids: (1, T).
    attention:               what each token may see.
    samplers:                the N sequences that draw in this step.
    sampled:                 (N,) index of the token after which each of them draws.
    """

    def __init__(self, rows: list[Row], cache: PagedCache) -> None:
        device, size = cache.device, cache.block_size
        rows = sorted(rows, key=_attention_order)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        self.samplers = [s for row in rows for s in row.samplers]
        for row in rows:
            blocks = row.sequence.blocks
            tokens += row.sequence.tokens[row.start : row.stop]
            positions += range(row.start, row.stop)
            slots += [blocks[p // size] * size + p % size for p in range(row.start, row.stop)]
            sampled += [len(tokens) - 1] * len(row.samplers)
        # each a tensor of its own, so that kernels find it where memory begins; numpy reads lists several times as fast as torch
        self.token_ids, self.position_ids, slots_1T = (
            to_device(torch.from_numpy(np.array([numbers])), device) for numbers in (tokens, positions, slots)
        )
        self.sampled = to_device(torch.tensor(sampled), device)
        fresh = [row.stop - row.start for row in rows if row.start == 0]
        self.attention = PagedAttention(cache, slots_1T[0], cached_rows(rows, cache), fresh)


def cached_rows(rows: list[Row], cache: PagedCache) -> list[CachedRows]:
    """The rows with cached tokens: those that decode gathered by length, each longer stretch alone.

    rows: in attention order.
    """
    groups: list[list[Row]] = []
    for row in rows:
        if row.start == 0:
            break
        decodes = row.stop - row.start == 1
        if groups and decodes and len(row.sequence.blocks) <= _longest_beside(len(groups[-1][0].sequence.blocks)):
            groups[-1].append(row)
        else:
            groups.append([row])
    result, first = [], 0
    for group in groups:
        width = max(len(row.sequence.blocks) for row in group)
        table = [row.sequence.blocks + [0] * (width - len(row.sequence.blocks)) for row in group]
        positions = [list(range(row.start, row.stop)) for row in group]
        result.append(
            CachedRows(
                first, to_device(torch.tensor(table), cache.device), to_device(torch.tensor(positions), cache.device)
            )
        )
        first += sum(row.stop - row.start for row in group)
    return result


def _longest_beside(num_blocks: int) -> int:
    """Rows up to this many blocks are padded together with one of `num_blocks`: more calls cost more than padding."""
    return num_blocks + max(4, num_blocks // 2)


def _attention_order(row: Row) -> tuple[int, int]:
    """Decoding rows by length, then parts of prompts, then those that begin here: as `PagedAttention` wants them."""
    if row.start == 0:
        return 2, 0
    return (0, len(row.sequence.blocks)) if row.stop - row.start == 1 else (1, 0)
