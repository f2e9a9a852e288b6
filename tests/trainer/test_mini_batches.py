"""Mini-batches: their rows do not depend on the number of ranks, and every rank gets the same number."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.mini_batches import Balanced, MiniBatches, lay_out, spread
from lockstep.workers.updates import mini_batches
from tests.tiny import random_batch

RANKS = [1, 2, 3, 4, 5]


def batch_of(num_rows: int, seed: int = 0) -> DataProto:
    """Rows with their index as `row`."""
    tensors = random_batch(num_rows, seed=seed)
    tensors["row"] = torch.arange(num_rows)
    return DataProto(tensors)


def is_padding(rows: Mapping[str, Tensor]) -> Tensor:
    return rows["attention_mask"].sum(-1) == 1


def taken(laid_out: DataProto, dp_size: int) -> list[tuple[Counter[int], dict[str, Any]]]:
    """The rows of each mini-batch over all ranks, without padding, and its counts."""
    ranks = [list(mini_batches(part)) for part in laid_out.chunk(dp_size)]
    steps = []
    for parts in zip(*ranks, strict=True):
        assert len({len(rows) for rows, _ in parts}) == 1, "ranks have different numbers of rows"
        assert len({str(info) for _, info in parts}) == 1
        numbers: Counter[int] = Counter()
        for rows, _ in parts:
            numbers.update(rows["row"][~is_padding(rows)].tolist())
        steps.append((numbers, parts[0][1]))
    return steps


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize(
    "rule",
    [
        MiniBatches(size=4),
        MiniBatches(size=4, epochs=3),
        MiniBatches(size=4, epochs=2, seed=7),
        MiniBatches(size=1, epochs=2, seed=7),
        MiniBatches(size=100),
    ],
    ids=["once", "epochs", "shuffled", "of-one-row", "whole"],
)
def test_composition_does_not_depend_on_the_ranks(rule: MiniBatches, balance: bool) -> None:
    batch = batch_of(11)
    expected = taken(lay_out(batch, rule, 1, balance=False), 1)
    assert len(expected) == rule.epochs * -(-11 // rule.size)
    for dp_size in RANKS:
        assert taken(lay_out(batch, rule, dp_size, balance=balance), dp_size) == expected


def test_composition_with_several_samples_per_prompt() -> None:
    """Rows of one prompt may be kept together, but stay in their mini-batch."""
    batch = batch_of(4).repeat(repeat_times=3, interleave=True)
    batch.tensors["row"] = torch.arange(12)
    for rule in (MiniBatches(size=6), MiniBatches(size=5, epochs=2, seed=1)):
        expected = taken(lay_out(batch, rule, 1, balance=False), 1)
        for dp_size in RANKS:
            assert taken(lay_out(batch, rule, dp_size, balance=True), dp_size) == expected


def test_every_pass_has_every_row_once() -> None:
    steps = taken(lay_out(batch_of(11), MiniBatches(size=4, epochs=2, seed=7), 3, balance=True), 3)
    first, second = steps[:3], steps[3:]
    for part in (first, second):
        assert sum((rows for rows, _ in part), Counter()) == Counter(range(11))
        assert [rows.total() for rows, _ in part] == [4, 4, 3]
    assert [rows for rows, _ in first] != [rows for rows, _ in second], "each pass is shuffled anew"


def test_passes_in_order_are_stored_once() -> None:
    laid_out = lay_out(batch_of(8), MiniBatches(size=4, epochs=3), 2, balance=False)
    assert len(laid_out) == 8 and laid_out.meta_info["num_repeats"] == 3
    assert len(taken(laid_out, 2)) == 6


def test_counts_are_over_the_whole_mini_batch() -> None:
    batch = batch_of(6)
    batch.tensors["response_mask"][4] = 0  # a row that trains nothing
    first, second = lay_out(batch, MiniBatches(size=3), 4, balance=True).meta_info["mini_batches"]
    mask = batch.tensors["response_mask"]
    assert first == {"batch_num_tokens": int(mask[:3].sum()), "global_batch_size": 3}
    assert second == {"batch_num_tokens": int(mask[3:].sum()), "global_batch_size": 2}


@pytest.mark.parametrize("dp_size", RANKS)
def test_padding_rows_have_one_token_and_no_loss(dp_size: int) -> None:
    batch = batch_of(3)
    laid_out = lay_out(batch, MiniBatches(size=2), dp_size, balance=True)
    added = is_padding(laid_out.tensors)
    assert int((~added).sum()) == 3
    assert not laid_out.tensors["response_mask"][added].any()
    for row in laid_out.tensors[added]:
        (place,) = row["attention_mask"].nonzero().flatten().tolist()
        assert row["position_ids"][place] == 0, "the one token is a first one"
        original = batch.tensors["attention_mask"][row["row"]]
        assert original.nonzero()[0] == place
    real = laid_out.tensors[~added]
    assert torch.equal(real["attention_mask"], batch.tensors["attention_mask"][real["row"]])
    assert torch.equal(real["response_mask"], batch.tensors["response_mask"][real["row"]])


def test_input_batch_is_not_modified() -> None:
    batch = batch_of(3)
    before = batch.tensors.clone()
    lay_out(batch, MiniBatches(size=3), 4, balance=True)
    assert (batch.tensors == before).all() and set(batch.tensors.keys()) == set(before.keys())


def test_fewer_rows_than_ranks() -> None:
    laid_out = lay_out(batch_of(2), MiniBatches(size=2), 5, balance=True)
    assert len(laid_out) == 5
    assert is_padding(laid_out.tensors).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("dp_size", RANKS)
@pytest.mark.parametrize("balance", [True, False])
def test_prepared_columns_follow_their_rows(dp_size: int, balance: bool) -> None:
    """Two passes in the same order: prepared columns may differ between passes."""
    calls = []

    def prepare(rows: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
        calls.append(number)
        return {"mark": rows["row"] * 100 + number, "share": rows["row"] / rows["row"].sum().clamp_min(1)}

    laid_out = lay_out(batch_of(7), MiniBatches(size=3, epochs=2, prepare=prepare), dp_size, balance=balance)
    assert calls == list(range(6)) and laid_out.meta_info["prepared"] == ["mark", "share"]
    rows = laid_out.tensors
    assert torch.equal(rows["mark"], rows["row"] * 100 + rows["mini_batch"])
    assert len(taken(laid_out, dp_size)) == 6


def test_tokens_are_balanced_across_ranks() -> None:
    batch = batch_of(64, seed=3)
    lengths = batch.tensors["attention_mask"].sum(-1)

    def most_and_least(balance: bool) -> tuple[int, int]:
        laid_out = lay_out(batch, MiniBatches(size=32), 4, balance=balance)
        sums = [int(rows["attention_mask"].sum()) for part in laid_out.chunk(4) for rows, _ in mini_batches(part)]
        return max(sums), min(sums)

    most, least = most_and_least(balance=True)
    assert most - least <= int(lengths.max())
    assert most - least < most_and_least(balance=False)[0] - most_and_least(balance=False)[1]


def test_spread() -> None:
    assert spread([5, 1, 1, 1], 2, balance=False) == [[0, 1], [2, 3]]
    assert sorted(map(sorted, spread([5, 1, 1, 1], 2, balance=True)))[0][0] == 0
    assert sorted(len(part) for part in spread([5, 1, 1, 1], 2, balance=True)) == [2, 2]
    assert [len(part) for part in spread([9, 8, 7], 2, balance=False)] == [2, 1]
    assert spread([3, 4], 4, balance=True) == [[0], [1], [], []]
    for num_parts in RANKS:
        for balance in (True, False):
            parts = spread([4, 1, 3, 9, 2, 8, 8], num_parts, balance=balance)
            assert len(parts) == num_parts and sorted(chain.from_iterable(parts)) == list(range(7))


class Future:
    def __init__(self, value: DataProto) -> None:
        self.value = value

    def get(self) -> DataProto:
        return self.value


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_balanced_call_returns_rows_in_order(num_parts: int) -> None:
    batch = batch_of(12, seed=4)
    seen: list[DataProto] = []

    def method(data: DataProto) -> Future:
        seen.append(data)
        return Future(DataProto.from_dict(tensors={"out": data.tensors["row"] * 10}))

    result = Balanced.over(batch, num_parts).call(method)()
    assert result.tensors["out"].tolist() == [10 * i for i in range(12)]
    sums = [int(part.tensors["attention_mask"].sum()) for part in seen[0].chunk(num_parts)]
    assert max(sums) - min(sums) <= int(batch.tensors["attention_mask"].sum(-1).max())


def test_call_with_indivisible_rows_keeps_its_order() -> None:
    """Dispatch pads at the end."""
    batch = batch_of(7)
    result = Balanced.over(batch, 2).call(lambda data: Future(data))()
    assert result.tensors["row"].tolist() == list(range(7))
