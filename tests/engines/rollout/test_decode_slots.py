"""Block tables of the decoding sequences, as CUDA graphs read them: on the CPU, without the kernels."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from lockstep.engines.rollout.embedded.block_manager import BlockManager
from lockstep.engines.rollout.embedded.scheduler import Scheduler
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.protocol.generation import GenerationRequest, SamplingParams

MODULE = "lockstep.engines.rollout.embedded.cuda.decode_slots"
KERNELS = "lockstep.kernels.sampling"


@pytest.fixture
def decode_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module without Triton: of the sampling kernels it reads sizes alone."""
    kernels: Any = ModuleType(KERNELS)
    kernels.STOPS, kernels.NUM_OPTIONS = 6, 3
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    monkeypatch.setattr(sys.modules["lockstep.kernels"], "sampling", kernels, raising=False)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def test_tables_on_the_device_are_those_of_the_sequences(decode_slots: Any) -> None:
    """While samples of one prompt copy its shared last block, grow, are preempted and finish."""
    blocks = BlockManager(20, block_size=4)
    scheduler = Scheduler(blocks, max_num_seqs=3, max_num_tokens=64, chunked=True, share_prompts=True)
    sampling = SamplingParams(max_tokens=21, ignore_eos=True)
    sequences = [Sequence(i, i, GenerationRequest([1] * 6, sampling, seed=i), frozenset(), 0) for i in range(5)]
    for sequence in sequences:
        scheduler.add(sequence)
    slots = decode_slots.DecodeSlots(3, 4, blocks.blocks_for(27), 1, 4, torch.device("cpu"))
    num_preempted = num_windows = 0
    while scheduler.has_unfinished:
        if scheduler.prefill_is_due:
            samplers = [s for row in scheduler.schedule_prefill().rows for s in row.samplers]
            slots.set_states(samplers, slots.assign(samplers))
            for sequence in samplers:
                sequence.append([7], [-1.0])
            continue
        window = scheduler.schedule_decode(3)
        running = [sequence for sequence, _ in window.rows]
        numbers = slots.assign(running)
        slots.set_tables(running, numbers)
        for sequence, number in zip(running, numbers):
            assert slots.tables[number, : len(sequence.blocks)].tolist() == sequence.blocks
        for sequence, count in window.rows:
            sequence.num_unread -= count
            sequence.append([7] * count, [-1.0] * count)
            if sequence.stop_reason is not None:
                scheduler.finish(sequence)
        num_windows += 1
        if num_windows == 2:
            scheduler.preempt_above(1)
            num_preempted += 1
    assert num_preempted and blocks.num_free == 20
