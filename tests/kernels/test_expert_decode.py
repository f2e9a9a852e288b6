"""Experts of few tokens as tiles of rows: against each token's formula, rounded where the grouped products round."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels import expert_decode  # noqa: E402
from lockstep.kernels.expert_decode import (  # noqa: E402
    ExpertTiles,
    expert_gate,
    expert_product,
    expert_tiles,
    max_tiles,
    rows_per_tile,
    sum_choices,
)

pytestmark = pytest.mark.gpu
HALF = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
"""The interpreter multiplies the bits of bfloat16."""
DTYPES = [torch.float32, *HALF]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = [
    (1, 2, 8, 32, 16),  # one token
    (5, 1, 6, 40, 24),  # top-1, sizes that are no multiples of the tiles
    (7, 3, 3, 64, 100),  # all experts for all tokens
    (40, 2, 5, 130, 70),  # tiles of 32 rows
    (50, 2, 3, 128, 64),  # tiles of 64 rows
    (12, 3, 40, 128, 72),  # most experts have one row or none
]
"""Tokens, choices per token, experts, width of the stream, inner width."""


class Experts(NamedTuple):
    """first (E, H, 2 I), last (E, I, H), biases (E, 2 I) and (E, H)."""

    first: Tensor
    last: Tensor
    first_bias: Tensor | None
    last_bias: Tensor | None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tiles = expert_tiles(chosen, len(self.first))
        inner = expert_gate(x, self.first, tiles, self.first_bias, weights)
        out = expert_product(inner, self.last, tiles, self.last_bias, weights)
        return sum_choices(out, tiles.top_k)

    def expected(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """In float32, rounded where the grouped products and what surrounds them round."""
        out = torch.empty(len(x), self.last.shape[2])
        for t in range(len(x)):
            total = torch.zeros(self.last.shape[2])
            for e, weight in zip(chosen[t].tolist(), weights[t].cpu().float()):
                gate_up = _rounded(x[t].cpu().float() @ self.first[e].cpu().float(), x.dtype)
                if self.first_bias is not None:
                    gate_up = _rounded(gate_up + self.first_bias[e].cpu().float(), x.dtype)
                gate, up = gate_up.chunk(2)
                inner = _rounded(_rounded(F.silu(gate) * up, x.dtype) * weight, x.dtype)
                row = _rounded(inner @ self.last[e].cpu().float(), x.dtype)
                if self.last_bias is not None:
                    row = _rounded(row + _rounded(self.last_bias[e].cpu().float() * weight, x.dtype), x.dtype)
                total += row
            out[t] = total
        return out.to(x.dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def random_experts(
    num_experts: int, width: int, inner: int, dtype: torch.dtype, transposed: bool = False, bias: bool = False
) -> Experts:
    """transposed: stored as (E, in, out), as GPT-OSS does; else (E, out, in), of which the weights are views."""
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> Tensor:
        stored = torch.randn(num_experts, rows, columns, generator=generator) / rows**0.5
        stored = stored.to(DEVICE, dtype)
        return stored if transposed else stored.transpose(1, 2).contiguous().transpose(1, 2)

    def biases(columns: int) -> Tensor:
        return torch.randn(num_experts, columns, generator=generator).to(DEVICE, dtype)

    own = (biases(2 * inner), biases(width)) if bias else (None, None)
    return Experts(weight(width, 2 * inner), weight(inner, width), *own)


def random_tokens(
    tokens: int, top_k: int, num_experts: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, width, generator=generator).to(DEVICE, dtype)
    weights, chosen = torch.rand(tokens, num_experts, generator=generator).topk(top_k)
    return x, chosen.to(DEVICE), weights.to(DEVICE, dtype)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and bool(got.isfinite().all())
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "top_k", "num_experts", "width", "inner"), SIZES)
def test_a_token_is_the_sum_of_its_experts(
    tokens: int, top_k: int, num_experts: int, width: int, inner: int, dtype: torch.dtype
) -> None:
    experts = random_experts(num_experts, width, inner, dtype)
    inputs = random_tokens(tokens, top_k, num_experts, width, dtype)
    assert_near(experts.forward(*inputs), experts.expected(*inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["out in", "in out"])
def test_both_layouts_and_biases(transposed: bool, bias: bool, dtype: torch.dtype) -> None:
    experts = random_experts(6, 72, 40, dtype, transposed, bias)
    x, chosen, weights = random_tokens(20, 2, 6, 72, dtype)
    assert_near(experts.forward(x, chosen, weights), experts.expected(x, chosen, weights))
    wide = weights.float() / 3  # of DeepSeek's routers
    assert_near(experts.forward(x, chosen, wide), experts.expected(x, chosen, wide))


@pytest.mark.parametrize("dtype", HALF)
def test_an_expert_with_all_rows_has_several_tiles(dtype: torch.dtype) -> None:
    experts = random_experts(40, 64, 32, dtype)
    x, _, weights = random_tokens(50, 2, 40, 64, dtype)
    chosen = torch.tensor([[7, 39]] * 50, device=DEVICE)
    tiles = expert_tiles(chosen, 40)
    assert tiles.experts.tolist() == [7] * 4 + [39] * 4 + [-1] * (len(tiles.experts) - 8)
    assert_near(experts.forward(x, chosen, weights), experts.expected(x, chosen, weights))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    experts = random_experts(12, 96, 48, dtype)
    x, chosen, weights = random_tokens(30, 3, 12, 96, dtype)
    whole = experts.forward(x, chosen, weights)
    for part in (slice(0, 1), slice(3, 17), slice(29, 30)):
        assert torch.equal(experts.forward(x[part], chosen[part], weights[part]), whole[part])
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert torch.equal(experts.forward(x[order], chosen[order], weights[order]), whole[order])
    broken = x.clone()
    broken[4] = float("nan")
    got = experts.forward(broken, chosen, weights)
    assert bool(got[4].isnan().all())
    others = torch.arange(30, device=DEVICE) != 4
    assert torch.equal(got[others], whole[others])


@pytest.mark.parametrize("columns", [64, 128])
def test_the_columns_of_a_program_change_nothing(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_decode, "MANY_PROGRAMS", 1 if columns == 128 else 1 << 30)
    experts = random_experts(6, 256, 136, torch.float16)
    inputs = random_tokens(9, 2, 6, 256, torch.float16)
    assert_near(experts.forward(*inputs), experts.expected(*inputs))


def test_strided_inputs_and_no_tokens() -> None:
    experts = random_experts(4, 48, 32, torch.float16, bias=True)
    x, chosen, weights = random_tokens(6, 2, 4, 96, torch.float16)
    expected = experts.expected(x[:, ::2], chosen, weights)
    both = torch.stack([chosen, chosen + 1], -1)[..., 0], torch.stack([weights, weights], -1)[..., 0]
    assert_near(experts.forward(x[:, ::2], *both), expected)
    assert_near(experts.forward(x[:, :48], chosen, weights), experts.expected(x[:, :48], chosen, weights))
    assert experts.forward(x[:0, :48], chosen[:0], weights[:0]).shape == (0, 48)


def rows_of(tiles: ExpertTiles) -> list[tuple[int, list[int]]]:
    """Expert and rows of each tile that is used. The others must be behind them."""
    listed = [(e, [r for r in rows if r >= 0]) for e, rows in zip(tiles.experts.tolist(), tiles.rows.tolist())]
    used = [tile for tile in listed if tile[0] >= 0]
    assert listed == used + [(-1, [])] * (len(listed) - len(used))
    return used


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"), [(1, 8, 128), (128, 8, 128), (33, 2, 1), (65, 4, 20), (96, 3, 7)]
)
def test_tiles_hold_each_row_once(tokens: int, top_k: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(3)
    # uneven: low numbers are chosen more often
    chosen = (torch.rand(tokens, top_k, generator=generator).square() * num_experts).long()
    num_rows, size = chosen.numel(), rows_per_tile(chosen.numel(), num_experts)
    expected = []
    for e in range(num_experts):
        rows = (chosen.flatten() == e).nonzero().flatten().tolist()
        expected += [(e, rows[i : i + size]) for i in range(0, len(rows), size)]
    tiles = expert_tiles(chosen.to(DEVICE), num_experts)
    assert rows_of(tiles) == expected
    assert len(tiles.experts) == max_tiles(num_rows, num_experts, size)


def test_the_number_of_tiles_is_bounded() -> None:
    for num_rows, num_experts, size in [(1, 5, 16), (40, 5, 16), (1024, 128, 16), (64, 3, 32)]:
        for used in range(1, min(num_rows, num_experts) + 1):
            most = used - 1 + -(-(num_rows - used + 1) // size)  # all experts but one have a single row
            worst = (num_rows - used) // size + used  # all tiles full, and one row more for each expert
            bound = max_tiles(num_rows, num_experts, size)
            assert max(most, worst) <= bound
        assert max_tiles(num_rows, num_experts, size) == max(
            (num_rows - n) // size + n for n in range(1, min(num_rows, num_experts) + 1)
        )
