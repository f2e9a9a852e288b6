"""States of rows are those of transformers' cache; packed tokens are computed as the rows that they are."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from lockstep.models.state_rows import PackedRows, RowBounds, RowStates

CPU = torch.device("cpu")
WIDTH = 3
"""Tokens that the convolution of `core` keeps."""
PACKS = {
    "one row": ([5], None),
    "rows of one token": ([1, 1, 1], None),
    "very different lengths": ([1, 90, 2, 17, 8, 40], None),
    "a group of three": ([7, 3, 5, 4], [(0, 0), (0, 4), (0, 4), (0, 0)]),
    "a prompt of one token": ([3, 2, 1, 9], [(0, 0), (0, 1), (0, 1), (0, 0)]),
    "responses of one token": ([5, 1, 1], [(0, 0), (0, 4), (0, 4)]),
    "an owner that is its prompt": ([4, 3, 12], [(0, 0), (0, 4), (0, 4)]),
    "two groups": ([9, 2, 30, 6, 1, 70], [(0, 0), (0, 5), (0, 5), (0, 0), (41, 5), (41, 5)]),
    "groups of two prompt lengths": ([9, 2, 6, 1], [(0, 0), (0, 5), (0, 0), (11, 3)]),
    "an empty row before an owner": ([3, 0, 7, 2], [(0, 0), (0, 0), (0, 0), (3, 4)]),
    "rows that are prompts": ([5, 0, 3, 0], [(0, 0), (0, 5), (0, 0), (5, 3)]),
}
"""Lengths of packed sequences, and where the prompt of each is if another one owns it."""


@pytest.mark.parametrize("parts", [(6, 1, 3), (2, 4), (1, 2, 1, 5), (9,)])
def test_states_are_those_of_transformers(parts: tuple[int, ...]) -> None:
    theirs, ours = LinearAttentionLayer(number_of_states=2), RowStates()
    for length in parts:
        for number in range(2):
            x = torch.randn(2, 3, length)
            kept = theirs.update_conv_state(x, number, conv_kernel_size=4)
            assert torch.equal(ours.update_conv_state(x, 0, number, conv_kernel_size=4), kept)
            assert torch.equal(ours.layers[0].conv_states[number], theirs.conv_states[number])
            state = torch.randn(2, 5)
            assert torch.equal(
                ours.update_recurrent_state(state, 0, number), theirs.update_recurrent_state(state, number)
            )
            assert torch.equal(ours.layers[0].recurrent_states[number], theirs.recurrent_states[number])
        assert ours.has_previous_state(0) and theirs.has_previous_state[0]


def test_rows_are_selected_and_joined() -> None:
    one = RowStates({("conv", 0): torch.arange(6).view(2, 3), ("recurrent", 0): torch.arange(2)})
    other = RowStates({("conv", 0): torch.ones(1, 3, dtype=torch.long), ("recurrent", 0): torch.tensor([9])})
    chosen = RowStates.cat([one, other]).select(torch.tensor([2, 0, 2]))
    assert chosen.conv_states[0].tolist() == [[1, 1, 1], [0, 1, 2], [1, 1, 1]]
    assert chosen.recurrent_states[0].tolist() == [9, 0, 9]
    assert not RowStates().has_previous_state()


@pytest.mark.parametrize("continues", [True, False])
@pytest.mark.parametrize("pack", PACKS)
def test_packed_rows_are_rows(pack: str, continues: bool) -> None:
    lengths, prefixes = PACKS[pack]
    x = torch.randn(1, sum(lengths), 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, sum(lengths), 2, dtype=torch.float64)
    rows = PackedRows(lengths, CPU, prefixes, continues=continues)
    got, expected = rows.run(core if continues else whole_rows, x), one_by_one(x, lengths, prefixes)
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad((out * weight).sum(), x)[0] for out in (got, expected)]
    torch.testing.assert_close(*gradients)
    if continues:
        torch.testing.assert_close(rows.run(WithoutPadding(), x), expected)


def test_little_is_padding() -> None:
    lengths = [100, 3, 60, 90, 4, 16]
    groups = PackedRows(lengths, CPU).groups
    assert sum(group.index.size for group in groups) <= 2 * sum(lengths)
    assert sum(int(group.own.sum()) for group in groups) == sum(lengths)


def test_a_shared_prompt_is_computed_once() -> None:
    lengths, prefixes = PACKS["a group of three"]
    tokens = np.concatenate([group.index[group.own] for group in PackedRows(lengths, CPU, prefixes).groups])
    assert sorted(tokens) == list(range(sum(lengths)))


def core(rows: Tensor, states: RowStates) -> Tensor:
    """A convolution and a recurrence: each token sees the two before it and a decaying sum of all."""
    inputs = states.update_conv_state(rows.transpose(1, 2), conv_kernel_size=WIDTH)
    inputs = F.pad(inputs, (WIDTH, 0))[..., -(rows.shape[1] + WIDTH - 1) :]
    mixed = (inputs.unfold(-1, WIDTH, 1) * torch.tensor([0.2, -0.5, 1.0], dtype=rows.dtype)).sum(-1).transpose(1, 2)
    total = states.recurrent_states.get(0, torch.zeros_like(rows[:, 0]))
    outputs = []
    for token in mixed.unbind(1):
        total = 0.7 * total + token.tanh()
        outputs.append(total)
    states.update_recurrent_state(total)
    return torch.stack(outputs, 1)


class WithoutPadding:
    """`core` as a `PackedCore`."""

    def __call__(self, rows: Tensor, states: RowStates) -> Tensor:
        raise AssertionError("rows are computed without padding")

    def packed(self, x: Tensor, bounds: RowBounds, states: RowStates) -> Tensor:
        assert bounds.num_tokens == x.shape[1]
        outputs, after = [], []
        for row, (start, stop) in enumerate(pairwise(bounds.tensor.tolist())):
            own = states.select(torch.tensor([row]))
            outputs.append(core(x[:, start:stop], own))
            after.append(own)
        states.tensors = RowStates.cat(after).tensors
        return torch.cat(outputs, 1)


def whole_rows(rows: Tensor, states: RowStates) -> Tensor:
    assert not states.tensors
    return core(rows, states)


def one_by_one(x: Tensor, lengths: Sequence[int], prefixes: Sequence[tuple[int, int]] | None) -> Tensor:
    outputs, start = [], 0
    for length, (first, before) in zip(lengths, prefixes or [(0, 0)] * len(lengths)):
        if not length:
            continue
        tokens = [*range(first, first + before), *range(start, start + length)]
        outputs.append(core(x[:, tokens], RowStates())[:, before:])
        start += length
    return torch.cat(outputs, 1)
