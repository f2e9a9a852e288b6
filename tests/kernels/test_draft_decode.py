"""Attention of decode steps with drafts against the formula over each sequence's tokens, and against that of single rows."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels import fp8  # noqa: E402
from lockstep.kernels.draft_decode import GROUP_ROWS, draft_attention  # noqa: E402
from lockstep.kernels.paged_decode import decode_attention, write_to_cache  # noqa: E402
from lockstep.models.layer_options import LayerOptions  # noqa: E402
from tests.models.attention_reference import naive_attention  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
SEQUENCES = [(1, 1), (30, 2), (52, GROUP_ROWS), (3, 3), (90, 2 * GROUP_ROWS + 3)]
"""Tokens of each sequence, and how many of the last are rows of the step."""
NUM_PADDING = GROUP_ROWS + 2
NUM_UNUSED = 5
SIZE = 4
BLOCKS = 80


class Step:
    """Queries, keys and values of the rows of a step, which end with rows of no sequence, and a cache that holds all tokens."""

    def __init__(
        self, heads: int, key_heads: int, dims: tuple[int, int], dtype: torch.dtype, in_8_bits: bool = False
    ) -> None:
        torch.manual_seed(3)
        self.in_8_bits = in_8_bits
        cached = fp8.DTYPE if in_8_bits else dtype
        self.cache = [torch.zeros(BLOCKS * key_heads, SIZE, d, dtype=cached, device=DEVICE) for d in dims]
        self.addresses = torch.tensor([cache.data_ptr() for cache in self.cache], device=DEVICE)
        blocks = iter(torch.randperm(BLOCKS - 1).add(1).tolist())  # the first is that of padding
        tables = torch.zeros(len(SEQUENCES) + 1, 40, dtype=torch.int64)
        slot_ids, positions, starts = [], [], []
        self.tokens: list[tuple[Tensor, Tensor]] = []
        news: list[tuple[Tensor, Tensor]] = []
        for slot_id, (length, count) in enumerate(SEQUENCES):
            num_blocks = -(-length // SIZE)
            tables[slot_id, :num_blocks] = torch.tensor([next(blocks) for _ in range(num_blocks)])
            place = torch.arange(length)
            slots = (tables[slot_id, place // SIZE] * SIZE + place % SIZE).to(DEVICE)
            key, value = (torch.randn(1, key_heads, length, d, device=DEVICE).to(dtype) for d in dims)
            if in_8_bits:
                key, value = (fp8.saturated(x).to(dtype) for x in (key, value))
            for x, cache in zip((key, value), self.cache):
                write_to_cache(x, cache, slots, SIZE, fp8=in_8_bits)
            self.tokens.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
            news.append((key[:, :, -count:], value[:, :, -count:]))
            starts += range(len(slot_ids), len(slot_ids) + count, GROUP_ROWS)
            slot_ids += [slot_id] * count
            positions += range(length - count, length)
        starts += range(len(slot_ids), len(slot_ids) + NUM_PADDING, GROUP_ROWS)
        slot_ids += [len(SEQUENCES)] * NUM_PADDING
        positions += [0] * NUM_PADDING
        starts += [len(slot_ids)] * (1 + NUM_UNUSED)
        self.tables = tables.int().to(DEVICE)
        self.slot_ids, self.positions, self.group_starts = (
            torch.tensor(x, device=DEVICE) for x in (slot_ids, positions, starts)
        )
        # adjacent heads of a token, as products give them
        self.query = torch.randn(1, len(slot_ids), heads, dims[0], device=DEVICE).to(dtype).transpose(1, 2)
        key, value = (torch.cat(t, 2) for t in zip(*news))
        zeros = [torch.zeros(1, key_heads, NUM_PADDING, d, dtype=dtype, device=DEVICE) for d in dims]
        self.key, self.value = torch.cat([key, zeros[0]], 2), torch.cat([value, zeros[1]], 2)

    def decode(self, options: LayerOptions, splits: int) -> Tensor:
        """(T, H, DV) of the rows of sequences."""
        out = draft_attention(
            *(self.query, self.addresses, self.tables, self.slot_ids, self.positions, self.group_starts),
            key_heads=self.key.shape[1],
            value_dim=self.value.shape[-1],
            scale=options.scaling,
            window=options.sliding_window,
            block_size=SIZE,
            max_splits=splits,
            softcap=options.softcap,
            sinks=options.sinks,
            chunk=options.chunk,
            fp8=self.in_8_bits,
        )
        assert out.shape == (1, len(self.slot_ids), self.query.shape[1], self.value.shape[-1])
        assert not out[0, -NUM_PADDING:].any()  # the mean of one value, which is 0
        return out[0, :-NUM_PADDING]

    def decode_rows(self, options: LayerOptions) -> Tensor:
        """The same by the attention of single rows."""
        nowhere = torch.full_like(self.positions, -1)
        out = decode_attention(
            *(self.query, self.key, self.value, self.addresses),
            *(self.tables, self.slot_ids, self.positions, nowhere),
            scale=options.scaling,
            window=options.sliding_window,
            block_size=SIZE,
            splits=1,
            softcap=options.softcap,
            sinks=options.sinks,
            chunk=options.chunk,
            fp8=self.in_8_bits,
        )
        return out[0, :-NUM_PADDING]

    def expected(self, options: LayerOptions) -> Tensor:
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.double())
        rows = self.query[0, :, :-NUM_PADDING].transpose(0, 1).double().split([count for _, count in SEQUENCES])
        parts = [naive_attention(q, k.double(), v.double(), options) for q, (k, v) in zip(rows, self.tokens)]
        return torch.cat(parts)


def assert_near(out: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (20, None), (None, 48)])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, 1.0), (None, 50.0)])
def test_rows_equal_the_formula(
    dtype: torch.dtype,
    splits: int,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: float | None,
) -> None:
    """sinks: about how large they are; large ones must not overflow. Some rows see no key of a tile, or of a split."""
    step = Step(2, 1, (24, 16), dtype)
    sinks_H = None if sinks is None else (torch.randn(2, device=DEVICE) + sinks).to(dtype)
    options = LayerOptions(0.3, window, softcap, sinks_H, chunk)
    assert_near(step.decode(options, splits), step.expected(options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim"),
    [(2, 2, 128), (4, 2, 64), (4, 1, 128), (14, 2, 24), (7, 1, 64), (8, 1, 128), (9, 1, 64), (2, 1, 256)],
)
def test_rows_equal_those_of_single_rows(dtype: torch.dtype, splits: int, heads: int, key_heads: int, dim: int) -> None:
    step = Step(heads, key_heads, (dim, dim), dtype)
    options = LayerOptions(dim**-0.5, sliding_window=60)
    out = step.decode(options, splits)
    assert_near(out, step.decode_rows(options))
    assert_near(out, step.expected(options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_cache_in_8_bits(dtype: torch.dtype, splits: int) -> None:
    if DEVICE.type == "cuda" and not fp8.has_fp8_products(DEVICE):
        pytest.skip("needs a GPU that has the type")
    step = Step(4, 2, (64, 64), dtype, in_8_bits=True)
    options = LayerOptions(0.1)
    out = step.decode(options, splits)
    assert_near(out, step.decode_rows(options))
    assert_near(out, step.expected(options))


COMPILE = """\
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.kernels.draft_decode import _decode_group, _queries_tile_warps_stages

POINTERS = {"partial": "*fp32", "stats": "*fp32"}
POINTERS |= dict.fromkeys(["addresses", "slot_ids", "positions", "group_starts"], "*i64") | {"tables": "*i32"}
for groups, dim in ((8, 128), (7, 64), (8, 512)):
    queries, tile, warps, stages = _queries_tile_warps_stages(dim, groups, torch.bfloat16)
    fixed = {"sinks_ptr": None, "G": groups, "HK": 2, "QUERIES": queries, "D": dim, "D_PADDED": dim, "DV": dim}
    fixed |= {"DV_PADDED": dim, "BLOCK_SIZE": 16, "TILE": tile, "SPLIT": True, "SOFTCAP": None, "PRECISION": "tf32"}
    fixed |= {"FP8": False, "K_ALIGNMENT": 16, "V_ALIGNMENT": 16}
    names = _decode_group.arg_names
    types = {}
    for name in names:
        pointer = POINTERS.get(name.removesuffix("_ptr"), "*bf16") if name.endswith("_ptr") else None
        number = "fp32" if name == "scale" else "i32"
        types[name] = "constexpr" if name in fixed else pointer or number
    source = ASTSource(_decode_group, types, {(names.index(name),): value for name, value in fixed.items()})
    options = {"num_warps": warps, "num_stages": stages}
    for capability in (80, 90):
        print(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)
"""


def test_programs_fit_into_the_shared_memory_of_most_gpus() -> None:
    """99 KiB with compute capability 8.6, 8.9 and 12.0; Triton compiles for a GPU on any machine."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, "-c", COMPILE]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = [int(size) for size in done.stdout.split()]
    assert len(sizes) == 6 and max(sizes) <= 99 * 1024
