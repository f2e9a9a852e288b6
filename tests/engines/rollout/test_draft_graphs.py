"""What a decode step with drafts uploads: each token's row, and groups of rows of one sequence."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.engines.rollout.embedded.cuda import draft_graphs  # noqa: E402
from lockstep.engines.rollout.embedded.cuda.decode_slots import DecodeSlots  # noqa: E402
from lockstep.engines.rollout.embedded.draft_controller import graph_sizes  # noqa: E402
from lockstep.engines.rollout.embedded.scheduler import PrefillRow  # noqa: E402
from lockstep.engines.rollout.embedded.sequence import Sequence  # noqa: E402
from lockstep.kernels.draft_decode import GROUP_ROWS  # noqa: E402
from lockstep.protocol.generation import GenerationRequest, SamplingParams  # noqa: E402

pytestmark = pytest.mark.gpu
NUM_SLOTS = 30
SIZE = 4


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> draft_graphs.DraftGraphs:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    runner: Any = SimpleNamespace(block_size=SIZE, num_moves=0)
    slots = DecodeSlots(NUM_SLOTS, 32, 20, 1, 4, DEVICE)
    return draft_graphs.DraftGraphs(runner, slots, max_model_len=80, use_graphs=False, sizes=graph_sizes(100))


@pytest.mark.parametrize("counts", [[1], [8], [9], [1, 17, 8, 3], [2] * 3 + [16] * 4 + [1] * 20, [1] * 30, []])
def test_rows_and_their_groups(graphs: draft_graphs.DraftGraphs, counts: list[int]) -> None:
    """Steps before have no effect. Without any sequence there is padding alone, as when a graph is captured."""
    size = graphs.size_of(max(1, sum(counts)))
    rows, tokens, positions = [], [], []
    for index, count in enumerate(counts):
        prompt = list(range(100 * index, 100 * index + 3 + index))
        request = GenerationRequest(prompt, SamplingParams(max_tokens=40), seed=index)
        sequence = Sequence(index, index, request, frozenset(), 0)
        sequence.blocks = list(range(20 * index, 20 * index + 20))
        start = len(prompt) - 1
        rows.append(PrefillRow(sequence, start, start + count, draft=[7] * (count - 1)))
        tokens += [prompt[-1], *[7] * (count - 1)]
        positions += range(start, start + count)
    sequences = [row.sequence for row in rows]
    slots = graphs.slots.assign(sequences)
    graphs.slots.set_tables(sequences, slots)
    graphs._pad_rows(32)
    if rows:
        graphs._fill(rows, slots, np.array(counts), sum(counts))
    else:
        graphs._pad_rows(size)

    inputs = graphs.rows.inputs[:, :size].cpu()
    num_padding = size - sum(counts)
    slot_ids = [slot for slot, count in zip(slots, counts) for _ in range(count)]
    cache_slots = [row.sequence.blocks[p // SIZE] * SIZE + p % SIZE for row in rows for p in range(row.start, row.stop)]
    assert inputs[draft_graphs.TOKEN].tolist() == tokens + [0] * num_padding
    assert inputs[draft_graphs.POSITION].tolist() == positions + [0] * num_padding
    assert inputs[draft_graphs.SLOT_ID].tolist() == slot_ids + [NUM_SLOTS] * num_padding
    assert inputs[draft_graphs.CACHE_SLOT].tolist() == cache_slots + [-1] * num_padding
    assert graphs.rows.state[:size, draft_graphs.sampling.ACTIVE].tolist() == [1] * sum(counts) + [0] * num_padding

    expected = []
    for count in [*counts, num_padding]:
        expected += [min(GROUP_ROWS, count - first) for first in range(0, count, GROUP_ROWS)]
    sizes = graphs.rows.group_starts.diff().tolist()
    assert sizes[: len(expected)] == expected and not any(sizes[len(expected) :])
    assert int(graphs.rows.group_starts[0]) == 0 and int(graphs.rows.group_starts[-1]) == size
    assert len(expected) <= graphs._num_groups(size) <= size  # the launch has `_num_groups` of them
