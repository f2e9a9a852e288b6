"""The block manager in hand-made cases and under random use: no block is lost, none is written through two tables."""

import pytest
from hypothesis import given, settings, strategies as st

from lockstep.engines.rollout.embedded.block_manager import BlockManager


def test_a_table_grows_by_whole_blocks() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    table: list[int] = []
    assert blocks.num_needed(table, 0, 5) == 2
    assert blocks.allocate(table, 0, 5) == []
    assert len(table) == 2 and blocks.num_free == 2
    assert blocks.num_needed(table, 5, 8) == 0
    assert blocks.allocate(table, 5, 8) == []
    assert blocks.num_needed(table, 8, 9) == 1
    blocks.free(table)
    assert table == [] and blocks.num_free == 4


def test_a_shared_partial_block_is_copied_before_it_is_written() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    first: list[int] = []
    blocks.allocate(first, 0, 6)
    second = blocks.share(first, 6)
    assert second == first and blocks.num_free == 6
    assert blocks.num_needed(second, 6, 7) == 1
    [(source, target)] = blocks.allocate(second, 6, 7)
    assert source == first[1] and target == second[1] and second[0] == first[0]
    assert blocks.allocate(first, 6, 7) == []  # the only table with this block now
    blocks.free(first)
    blocks.free(second)
    assert blocks.num_free == 8


def test_full_blocks_stay_shared() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    first: list[int] = []
    blocks.allocate(first, 0, 8)
    second = blocks.share(first, 8)
    assert blocks.allocate(second, 8, 9) == []
    assert second[:2] == first


def test_growing_adds_free_blocks() -> None:
    blocks = BlockManager(num_blocks=1, block_size=4)
    table: list[int] = []
    blocks.allocate(table, 0, 4)
    blocks.grow(3)
    blocks.allocate(table, 4, 12)
    assert table == [0, 1, 2] and blocks.num_free == 0


def test_a_free_block_cannot_be_freed_again() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    with pytest.raises(AssertionError, match="block 1 is free"):
        blocks.free([1])


def test_slots_are_handed_out_once() -> None:
    blocks = BlockManager(num_blocks=1, block_size=4, num_slots=2)
    first, second = blocks.take_slot(), blocks.take_slot()
    assert {first, second} == {0, 1} and blocks.num_free_slots == 0
    blocks.grow(1, 3)
    assert blocks.take_slot() == 2
    blocks.free_slot(second)
    assert blocks.num_free_slots == 1 and blocks.take_slot() == second
    blocks.free_slot(first)
    with pytest.raises(AssertionError, match=f"slot {first} is free"):
        blocks.free_slot(first)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_use_loses_no_block_and_overwrites_no_other_table(data: st.DataObject) -> None:
    """Each table mirrors the tokens it wrote; a write through one table must never change another."""
    size = data.draw(st.integers(1, 5))
    blocks = BlockManager(num_blocks=data.draw(st.integers(1, 12)), block_size=size)
    memory: dict[tuple[int, int], int] = {}  # (block, offset) -> written value
    tables: list[tuple[list[int], list[int]]] = []  # (table, values of its tokens)
    stamp = 0
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["new", "write", "share", "free"]))
        if action == "new" or not tables:
            tables.append(([], []))
            continue
        table, values = tables[data.draw(st.integers(0, len(tables) - 1))]
        if action == "write":
            start, stop = len(values), len(values) + data.draw(st.integers(1, 6))
            if blocks.num_needed(table, start, stop) > blocks.num_free:
                continue
            before = blocks.num_free
            needed = blocks.num_needed(table, start, stop)
            for source, target in blocks.allocate(table, start, stop):
                for offset in range(size):
                    if (source, offset) in memory:
                        memory[target, offset] = memory[source, offset]
            assert before - blocks.num_free == needed
            for position in range(start, stop):
                stamp += 1
                memory[table[position // size], position % size] = stamp
                values.append(stamp)
        elif action == "share":
            count = data.draw(st.integers(0, len(values)))
            tables.append((blocks.share(table, count), values[:count]))
        else:
            blocks.free(table)
            values.clear()
        for held, seen in tables:
            assert [memory[held[p // size], p % size] for p in range(len(seen))] == seen
    used = {block for table, _ in tables for block in table}
    assert blocks.num_free == blocks.num_blocks - len(used)
    for table, _ in tables:
        blocks.free(table)
    assert blocks.num_free == blocks.num_blocks
