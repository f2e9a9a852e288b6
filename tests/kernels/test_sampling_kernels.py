"""Sampling kernels against the torch sampler, and the state of the decode slots."""

from typing import Any

import pytest
import torch

from lockstep.engines.rollout.embedded.sampler import SamplingBatch, sample, uniform
from lockstep.engines.rollout.rollout_engine import SamplingParams
from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels import sampling as kernels  # noqa: E402

pytestmark = pytest.mark.gpu
RING = 4


class Slots:
    def __init__(self, count: int, width: int = 6) -> None:
        self.slot_state = torch.zeros(count + 1, kernels.STOPS + 2, dtype=torch.int64, device=DEVICE)
        self.slot_state[:, kernels.STOPS :] = -1
        self.slot_options = torch.ones(count + 1, kernels.NUM_OPTIONS, device=DEVICE)
        self.tables = torch.arange((count + 1) * width, dtype=torch.int32, device=DEVICE).view(count + 1, width)
        self.step = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.tokens = torch.full((RING, count + 1), -7, dtype=torch.int32, device=DEVICE)
        self.log_probs = torch.zeros(RING, count + 1, device=DEVICE)

    def assign(self, slot: int, params: SamplingParams, seed: int, position: int, last: int, token: int = 0) -> None:
        fields = [position, 1, seed, last, token, max(params.top_k, 0)]
        self.slot_state[slot, : kernels.STOPS] = torch.tensor(fields)
        self.slot_options[slot] = torch.tensor([params.temperature, params.top_p, params.min_p])

    def sample(
        self, logits: torch.Tensor, slots: list[int], filtered: bool = True, excluded: torch.Tensor | None = None
    ) -> None:
        slot_ids = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        state = self.slot_state, self.slot_options, slot_ids
        outputs = self.step, self.tokens, self.log_probs
        kernels.sample(logits, *state, *outputs, filtered=filtered, excluded=excluded)


@pytest.mark.parametrize("vocabulary", [30, 9001])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_k": 1},
        {"top_k": 100000},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"top_p": 1e-300},
        {"temperature": 1e-40},
        {"temperature": 1e-5, "top_p": 0.9},
        {"top_k": 12, "top_p": 0.5, "temperature": 1.7},
        {"min_p": 0.2},
        {"min_p": 1.0, "temperature": 0.6},
        {"min_p": 0.02, "top_k": 7, "temperature": 2.0},
        {"min_p": 0.05, "top_p": 0.6},
    ],
)
def test_samples_equal_the_torch_sampler(vocabulary: int, sampling: dict[str, Any]) -> None:
    count = 12
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(5)) * 3
    params = SamplingParams(**sampling)
    seeds, positions = list(range(-3, count - 3)), list(range(100, 100 + count))
    batch = SamplingBatch([params] * count, torch.device("cpu"))
    tokens, log_probs = sample(logits, batch, uniform(seeds, [p + 1 for p in positions]))
    slots = Slots(count)
    for i in range(count):
        slots.assign(i, params, seeds[i], positions[i], last=1000)
    for filtered in {params.filtered, True}:
        slots.slot_state[:count, kernels.POSITION] = torch.tensor(positions, device=DEVICE)
        slots.sample(logits.to(DEVICE), list(range(count)), filtered)
        assert slots.tokens[0, :count].tolist() == tokens.tolist()
        rounding = 1e-6 / (params.temperature or 1)  # of logits that are divided by it
        torch.testing.assert_close(slots.log_probs[0, :count].cpu(), log_probs, atol=max(2e-5, rounding), rtol=1e-5)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.6, "temperature": 0.7}])
@pytest.mark.parametrize("ids", [[29], [3, 7, 8]])
def test_excluded_tokens_are_not_sampled(ids: list[int], sampling: dict[str, Any]) -> None:
    """Their logits are the largest; log-probs are those of the full distribution."""
    count = 12
    logits = torch.randn(count, 30, generator=torch.Generator().manual_seed(5)) * 3
    excluded = torch.tensor(ids)
    logits[:, excluded] = 9.0
    params = SamplingParams(**sampling)
    positions = list(range(100, 100 + count))
    batch = SamplingBatch([params] * count, torch.device("cpu"), excluded)
    tokens, log_probs = sample(logits, batch, uniform(list(range(count)), [p + 1 for p in positions]))
    slots = Slots(count)
    for i in range(count):
        slots.assign(i, params, i, positions[i], last=1000)
    slots.sample(logits.clone().to(DEVICE), list(range(count)), params.filtered, excluded.to(DEVICE))
    assert slots.tokens[0, :count].tolist() == tokens.tolist()
    assert not set(ids) & set(tokens.tolist())
    torch.testing.assert_close(slots.log_probs[0, :count].cpu(), log_probs, atol=2e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_other_rows_or_its_slot() -> None:
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5, temperature=0.7),
        SamplingParams(top_k=10, top_p=0.9, min_p=0.1),
    ]
    together = Slots(5)
    for i, p in enumerate(params):
        together.assign(i, p, 9, 4, last=100)
    together.sample(logits, [0, 1, 2, 3, 4])
    for i, p in enumerate(params):
        alone = Slots(5)
        alone.assign(3, p, 9, 4, last=100)
        alone.sample(logits[i : i + 1], [3], filtered=p.filtered)
        assert alone.tokens[0, 3] == together.tokens[0, i]
        assert alone.log_probs[0, 3] == together.log_probs[0, i]


def test_slots_advance_and_stop() -> None:
    slots = Slots(4)
    greedy = SamplingParams(temperature=0.0)
    for slot, last in ((0, 50), (1, 11), (2, 50)):
        slots.assign(slot, greedy, 0, 10, last, token=7)
    slots.slot_state[2, kernels.STOPS + 1] = 5  # stop token 5
    slot_ids = torch.tensor([2, 0, 4, 1, 3], dtype=torch.int32, device=DEVICE)
    tokens, positions, cache_slots = (torch.zeros(5, dtype=torch.int64, device=DEVICE) for _ in range(3))

    def begin() -> None:
        kernels.begin_step(
            slots.slot_state,
            slots.tables,
            slot_ids,
            tokens,
            positions,
            cache_slots,
            slots.step,
            ring=RING,
            block_size=4,
        )

    begin()
    assert slots.step.item() == 1
    assert tokens.tolist() == [7, 7, 0, 7, 0] and positions.tolist() == [10, 10, 0, 10, 0]
    assert cache_slots.tolist() == [(2 * 6 + 2) * 4 + 2, (0 * 6 + 2) * 4 + 2, -1, (1 * 6 + 2) * 4 + 2, -1]
    logits = torch.zeros(5, 10, device=DEVICE)
    logits[:, 5] = 3.0
    slots.sample(logits, slot_ids.tolist(), filtered=False)
    assert slots.tokens[1].tolist() == [5, 5, 5, -1, -1]
    assert slots.slot_state[:, kernels.ACTIVE].tolist() == [1, 0, 0, 0, 0]  # 1 reached its length, 2 its stop token
    begin()
    assert positions.tolist() == [0, 11, 0, 0, 0] and tokens.tolist() == [0, 5, 0, 0, 0]
    slots.sample(logits, slot_ids.tolist(), filtered=False)
    assert slots.tokens[2].tolist() == [5, -1, -1, -1, -1]
    begin()
    begin()
    assert slots.step.item() == 0
