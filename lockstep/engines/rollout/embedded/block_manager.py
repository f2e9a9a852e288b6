"""Allocation of KV cache blocks and state slots. Numbers only: the tensors are in `paged_attention.py` and `state_slots.py`.

A block table lists the blocks that hold a sequence's tokens, in order. Samples of one prompt share its blocks, which are reference
counted; a shared block is copied before it is written. The state of a running sequence (recurrence, convolution) has a slot that
is never shared; models without states have no slots.
"""

from collections import deque
from collections.abc import Sequence


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, num_slots: int = 0) -> None:
        self.block_size = block_size
        self.num_slots = 0
        self._ref_counts: list[int] = []
        self._free: deque[int] = deque()
        self._free_slots: deque[int] = deque()
        self.grow(num_blocks, num_slots)

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def grow(self, num_blocks: int, num_slots: int = 0) -> None:
        """Add free blocks and slots up to `num_blocks` and `num_slots`."""
        self._free.extend(range(self.num_blocks, num_blocks))
        self._ref_counts.extend([0] * (num_blocks - self.num_blocks))
        self._free_slots.extend(range(self.num_slots, num_slots))
        self.num_slots = max(self.num_slots, num_slots)

    def take_slot(self) -> int:
        return self._free_slots.popleft()

    def free_slot(self, slot: int) -> None:
        assert 0 <= slot < self.num_slots and slot not in self._free_slots, f"slot {slot} is free"
        self._free_slots.append(slot)

    def num_needed(self, table: Sequence[int], start: int, stop: int) -> int:
        """Free blocks needed to write tokens start..stop of this table: new blocks and copies of shared ones."""
        needed = self.blocks_for(stop)
        num_known = len(table)
        num_shared = 0
        for i in range(start // self.block_size, min(num_known, needed)):
            num_shared += self._ref_counts[table[i]] > 1
        return max(0, needed - num_known) + num_shared

    def allocate(self, table: list[int], start: int, stop: int) -> list[tuple[int, int]]:
        """Extend the table so that tokens start..stop can be written; `num_needed` blocks must be free.

        Returns the (source, target) blocks to copy before the write.
        """
        copies = []
        needed = self.blocks_for(stop)
        for i in range(start // self.block_size, min(len(table), needed)):
            if self._ref_counts[table[i]] > 1:
                source, target = table[i], self._pop_free()
                self._ref_counts[source] -= 1
                table[i] = target
                copies.append((source, target))
        while len(table) < needed:
            table.append(self._pop_free())
        return copies

    def share(self, table: Sequence[int], num_tokens: int) -> list[int]:
        """A second table over the blocks of the first `num_tokens` tokens of `table`."""
        shared = list(table[: self.blocks_for(num_tokens)])
        for block in shared:
            assert self._ref_counts[block] > 0, f"block {block} is free"
            self._ref_counts[block] += 1
        return shared

    def free(self, table: list[int]) -> None:
        """Clear the table; its blocks become free once no other table holds them."""
        for block in table:
            assert self._ref_counts[block] > 0, f"block {block} is free"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)
        table.clear()

    def _pop_free(self) -> int:
        block = self._free.popleft()
        self._ref_counts[block] = 1
        return block
