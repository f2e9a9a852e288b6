"""What a table gives is what the rotary module gives, and a module that cannot have one is told."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lockstep.models import rotary_table
from lockstep.models.rotary_table import RotaryTable, as_numbers, pair_order, stands_still

LONG_FACTORS = {
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def rotary_of(kind: str = "default", **more: object) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **more}
    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=16, num_attention_heads=2, max_position_embeddings=64, rope_parameters=parameters)
    )


def joined(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat((cos, sin), 1)


def assert_gives(table: RotaryTable, rotary: LlamaRotaryEmbedding, positions: list[int], dtype: torch.dtype) -> None:
    like, ids = torch.zeros(1, dtype=dtype), torch.tensor([positions])
    cos, sin = rotary(like, ids)
    found = table(rotary, like, ids)
    assert found.dtype == dtype
    assert torch.equal(found, torch.cat((cos[0], sin[0]), 1))


def test_positions_types_and_frequencies_that_change() -> None:
    rotary, table = rotary_of(), RotaryTable(joined, dim=0)
    for positions in ([0, 1, 2], [40, 3], [5], [63, 0]):
        assert_gives(table, rotary, positions, torch.float32)
    assert_gives(table, rotary, [7, 2], torch.float64)
    assert_gives(table, rotary, [7, 2], torch.float32)
    rotary.register_buffer("inv_freq", rotary.inv_freq * 0.5, persistent=False)
    assert_gives(table, rotary, [7, 2], torch.float32)


def test_no_position_is_asked_for_that_nobody_has() -> None:
    asked: list[int] = []

    def rotary(like: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.extend(ids.flatten().tolist())
        return torch.zeros(*ids.shape, 2), torch.zeros(*ids.shape, 2)

    RotaryTable(joined, dim=0)(rotary, torch.zeros(1), torch.tensor([[12, 3]]))
    assert max(asked) == 12


def test_positions_beyond_the_largest_table_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_table, "LARGEST_TABLE", 8)
    rotary, table = rotary_of(), RotaryTable(joined, dim=0)
    for positions in ([2, 20], [3, 4], [8, 1], [7, 0]):
        assert_gives(table, rotary, positions, torch.float32)
        assert len(table._table) <= 8


def test_numbers_turn_pairs_as_the_halves_are_turned() -> None:
    rotary, x = rotary_of(), torch.randn(3, 8)
    cos, sin = (t[0] for t in rotary(x, torch.tensor([[0, 5, 9]])))
    expected = x * cos + torch.cat((-x[:, 4:], x[:, :4]), 1) * sin
    numbers = torch.view_as_complex(as_numbers(cos, sin).view(3, -1, 2))
    turned = torch.view_as_real(torch.view_as_complex(x[:, pair_order(8)].view(3, -1, 2)) * numbers).flatten(1)
    torch.testing.assert_close(turned[:, pair_order(8).argsort()], expected)


def test_which_ropes_stand_still() -> None:
    like = torch.zeros(1)
    for kind, more in (("default", {}), ("linear", {"factor": 2.0}), ("yarn", {"factor": 2.0})):
        assert stands_still(rotary_of(kind, **more), like)
    assert not stands_still(rotary_of("dynamic", factor=2.0), like)
    longrope = rotary_of("longrope", **LONG_FACTORS)
    assert not stands_still(longrope, like)
    assert not stands_still(lambda like, ids, layer_type: None, like)
    longrope.rope_type = None  # without its name, by what it does
    longrope.forward = lambda like, ids: [(1 + (ids.max() > 16)) * torch.ones(*ids.shape, 8)] * 2
    assert not stands_still(longrope, like)
