"""Attention of new tokens over a paged cache of latents against the formula over each row's tokens."""

import os
import subprocess
import sys

import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels.key_scores import key_scores  # noqa: E402
from lockstep.kernels.latent_decode import latent_attention  # noqa: E402
from lockstep.kernels.paged_decode import write_to_cache  # noqa: E402
from lockstep.models.key_index import KeyIndex  # noqa: E402
from lockstep.models.layer_options import LayerOptions  # noqa: E402
from tests.models.attention_reference import naive_attention  # noqa: E402

pytestmark = pytest.mark.gpu
LARGE = pytest.mark.skipif(DEVICE.type == "cpu", reason="too large for the interpreter")
DTYPES = [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16]
"""The interpreter multiplies the bits of bfloat16."""
SIZES = [
    (4, 32, 8, 4),
    (20, 24, 10, 1),
    pytest.param(16, 512, 64, 16, marks=LARGE),
    pytest.param(128, 512, 64, 16, marks=LARGE),
]
"""Query heads, latent size, size of the rope key, block size."""
LENGTHS = [1, 2, 18, 75]


class Rows:
    """Rows of these lengths, of which all tokens but the last are cached, and an idle one.

    scored: numbers of the scorer's key that are cached beside a latent.
    """

    def __init__(self, heads: int, rank: int, rope: int, size: int, dtype: torch.dtype, scored: int = 0) -> None:
        torch.manual_seed(3)
        dim, num_blocks = rank + rope + scored, 4 + sum(LENGTHS) // size + len(LENGTHS)
        self.store = torch.randn(num_blocks, size, dim, device=DEVICE).to(dtype)
        self.tables = torch.zeros(9, 80, dtype=torch.int32)
        self.slot_ids = [3, 0, 7, 5, 8]
        self.query = torch.randn(1, heads, len(LENGTHS) + 1, rank + rope, device=DEVICE).to(dtype)
        self.key = torch.randn(1, 1, len(LENGTHS) + 1, dim, device=DEVICE).to(dtype)
        self.tokens, self.cache_slots = [], []
        order = torch.randperm(num_blocks).tolist()
        for row, (slot_id, length) in enumerate(zip(self.slot_ids, LENGTHS)):
            for place in range(-(-length // size)):
                self.tables[slot_id, place] = order.pop()
            places = [int(self.tables[slot_id, p // size]) * size + p % size for p in range(length)]
            flat = self.store.view(-1, dim)
            self.tokens.append(torch.cat([flat[places[:-1]], self.key[0, 0, row, None]]))
            self.cache_slots.append(places[-1])
        self.rank, self.size = rank, size

    def decode(
        self, options: LayerOptions, splits: int, *, written: bool = False, picked: torch.Tensor | None = None
    ) -> torch.Tensor:
        """written: whether the new tokens are in the cache already."""
        return latent_attention(
            *(self.query, self.key, *self.places),
            None if written else torch.tensor([*self.cache_slots, -1], device=DEVICE),
            latent_dim=self.rank,
            scale=options.scaling,
            window=options.sliding_window,
            chunk=options.chunk,
            softcap=options.softcap,
            sinks=None if options.sinks is None else options.sinks.to(self.query.dtype),
            block_size=self.size,
            splits=splits,
            picked=picked,
        )

    @property
    def places(self) -> tuple[torch.Tensor, ...]:
        """Addresses, tables, slot ids and positions."""
        return (
            torch.tensor([self.store.data_ptr(), 0], device=DEVICE),
            self.tables.to(DEVICE),
            torch.tensor(self.slot_ids, dtype=torch.int32, device=DEVICE),
            torch.tensor([n - 1 for n in LENGTHS] + [0], device=DEVICE),
        )

    def write(self) -> None:
        slots = torch.tensor([*self.cache_slots, -1], device=DEVICE)
        write_to_cache(self.key, None, slots, self.size, address=self.places[0][:1])

    def expected(self, options: LayerOptions) -> torch.Tensor:
        """(T, H, R) in float64."""
        rows = []
        for row, tokens in enumerate(self.tokens):
            query, keys = self.query[0, :, row].double()[None], tokens.double()[:, None]
            rows.append(naive_attention(query, keys, keys[..., : self.rank], options)[0])
        return torch.stack(rows)


def assert_equal(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.shape[1] == len(LENGTHS) + 1 and bool(out.isfinite().all())
    tolerance = 1e-5 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out[0, : len(LENGTHS)].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "rank", "rope", "size"), SIZES)
def test_rows_equal_the_formula(dtype: torch.dtype, splits: int, heads: int, rank: int, rope: int, size: int) -> None:
    rows, options = Rows(heads, rank, rope, size, dtype), LayerOptions((rank + rope) ** -0.5)
    before = rows.store.clone()
    assert_equal(rows.decode(options, splits), rows.expected(options))
    flat = rows.store.view(-1, rank + rope)
    assert torch.equal(flat[rows.cache_slots], rows.key[0, 0, : len(LENGTHS)])
    assert int((before != rows.store).any(-1).sum()) == len(LENGTHS)  # nothing else was written


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("window", "chunk", "softcap", "sinks"),
    [(20, None, None, None), (None, 48, None, None), (None, None, 2.0, 1.0), (None, None, None, 50.0)],
)
def test_options(
    splits: int, window: int | None, chunk: int | None, softcap: float | None, sinks: float | None
) -> None:
    """sinks: about how large they are; large ones must not overflow."""
    rows = Rows(20, 32, 8, 4, torch.float32)
    sinks_H = None if sinks is None else torch.randn(20, device=DEVICE).double() + sinks
    options = LayerOptions(0.3, window, softcap, sinks_H, chunk)
    assert_equal(rows.decode(options, splits), rows.expected(options))


@pytest.mark.parametrize("splits", [1, 2])
def test_new_tokens_may_be_written_before(splits: int) -> None:
    rows, options = Rows(4, 32, 8, 4, torch.float32), LayerOptions(0.2)
    rows.write()
    assert_equal(rows.decode(options, splits, written=True), rows.expected(options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "size", "scorer"),
    [(4, 32, 8, 4, (5, 12)), pytest.param(64, 512, 64, 16, (64, 128), marks=LARGE)],
)
@pytest.mark.parametrize(("topk", "window", "sinks"), [(6, None, None), (17, None, 1.0), (18, 20, None)])
def test_keys_that_an_index_picks(
    dtype: torch.dtype,
    splits: int,
    heads: int,
    rank: int,
    rope: int,
    size: int,
    scorer: tuple[int, int],
    topk: int,
    window: int | None,
    sinks: float | None,
) -> None:
    rows = Rows(heads, rank, rope, size, dtype, scored=scorer[1])
    rows.write()
    sinks_H = None if sinks is None else torch.randn(heads, device=DEVICE).to(dtype) + sinks
    options = LayerOptions((rank + rope) ** -0.5, window, sinks=sinks_H)
    queries = torch.randn(1, len(LENGTHS) + 1, *scorer, device=DEVICE).to(dtype)
    index = KeyIndex(queries, torch.randn(1, len(LENGTHS) + 1, scorer[0], device=DEVICE), topk)
    scores = key_scores(*(queries, index.weights, rows.key, *rows.places), window=window, chunk=None, block_size=size)
    assert scores.shape == (len(LENGTHS) + 1, rows.tables.shape[1] * size)
    out = rows.decode(options, splits, written=True, picked=scores.topk(topk, -1, sorted=False).indices)
    expected = []
    for row, (tokens, length) in enumerate(zip(rows.tokens, LENGTHS)):
        hidden = options.hides(length - 1, torch.arange(length, device=DEVICE))
        assert bool((scores[row, :length].isfinite() == ~hidden).all()) and not scores[row, length:].isfinite().any()
        unpicked = index.tokens(slice(row, row + 1)).hide_others(tokens[None, :, rank + rope :], hidden[None, None])
        keys = tokens[~unpicked[0, 0]].double()[:, None]
        assert len(keys) == min(topk, length, window or length)
        plain = LayerOptions(options.scaling, sinks=None if sinks_H is None else sinks_H.double())
        query = rows.query[0, :, row].double()[None]
        expected.append(naive_attention(query, keys[..., : rank + rope], keys[..., :rank], plain)[0])
    assert_equal(out, torch.stack(expected))


def test_keys_without_numbers_are_not_written() -> None:
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    write_to_cache(torch.zeros(1, 1, 3, 0, device=DEVICE), None, slots, 4, address=slots[:1])


COMPILE = """\
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.kernels.latent_decode import _decode_latents, _heads_tile_warps_stages

POINTERS = {"partial": "*fp32", "stats": "*fp32", "addresses": "*i64", "tables": "*i32", "slot_ids": "*i32"}
POINTERS |= {"positions": "*i64", "cache_slots": "*i64"}
for num_heads in (16, 128):
    heads, tile, warps, stages = _heads_tile_warps_stages(num_heads, torch.bfloat16)
    fixed = {"sinks_ptr": None, "picked_ptr": None, "topk": 0, "H": num_heads, "HEADS": heads, "R": 512, "R_PADDED": 512}
    fixed |= {"DR": 64, "DR_PADDED": 64, "W": 576, "BLOCK_SIZE": 16, "TILE": tile, "SPLIT": True, "SOFTCAP": None}
    fixed |= {"PRECISION": "tf32", "R_ALIGNMENT": 16, "DR_ALIGNMENT": 16}
    names = _decode_latents.arg_names
    types = {}
    for name in names:
        pointer = POINTERS.get(name.removesuffix("_ptr"), "*bf16") if name.endswith("_ptr") else None
        number = "fp32" if name == "scale" else "i32"
        types[name] = "constexpr" if name in fixed else pointer or number
    source = ASTSource(_decode_latents, types, {(names.index(name),): value for name, value in fixed.items()})
    options = {"num_warps": warps, "num_stages": stages}
    print(triton.compile(source, target=GPUTarget("cuda", 89, 32), options=options).metadata.shared)
"""


def test_programs_fit_into_the_shared_memory_of_most_gpus() -> None:
    """99 KiB with compute capability 8.6, 8.9 and 12.0, for which Triton compiles on any machine."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, "-c", COMPILE]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = [int(size) for size in done.stdout.split()]
    assert len(sizes) == 2 and max(sizes) <= 99 * 1024
