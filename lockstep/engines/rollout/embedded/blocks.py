"""Who holds which block of the KV cache. Numbers only: the tensors are in `models/paged_attention.py`.

A table is the list of blocks that hold a sequence's tokens in order. A block may be in several tables (samples of one
prompt); whoever writes into such a block gets a copy of it first.
"""

from collections import deque
from collections.abc import Sequence


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._references: list[int] = []
        self._free: deque[int] = deque()
        self.grow(num_blocks)

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`."""
        self._free.extend(range(self.num_blocks, num_blocks))
        self._references.extend([0] * (num_blocks - self.num_blocks))

    def num_to_write(self, table: Sequence[int], start: int, stop: int) -> int:
        """Free blocks that writing the tokens start..stop of this table takes: new ones and copies of shared ones."""
        new = max(0, self.num_for(stop) - len(table))
        return new + sum(1 for i in self._written(table, start, stop) if self._references[table[i]] > 1)

    def prepare_write(self, table: list[int], start: int, stop: int) -> list[tuple[int, int]]:
        """Make the places of the tokens start..stop writable.

        Gives the (source, target) blocks to copy before the write. There must be `num_to_write` free blocks.
        """
        copies = []
        for i in self._written(table, start, stop):
            if self._references[table[i]] > 1:
                source, target = table[i], self._take()
                self._references[source] -= 1
                table[i] = target
                copies.append((source, target))
        while len(table) < self.num_for(stop):
            table.append(self._take())
        return copies

    def share(self, table: Sequence[int], num_tokens: int) -> list[int]:
        """A second table with the blocks that hold the first `num_tokens` tokens of `table`."""
        shared = list(table[: self.num_for(num_tokens)])
        for block in shared:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1
        return shared

    def release(self, table: list[int]) -> None:
        """Empty the table; blocks that no table holds any more are free."""
        for block in table:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
        table.clear()

    def _written(self, table: Sequence[int], start: int, stop: int) -> range:
        return range(start // self.block_size, min(len(table), self.num_for(stop)))

    def _take(self) -> int:
        block = self._free.popleft()
        self._references[block] = 1
        return block
