"""Attention of new tokens over a paged cache of latents against the formula over each row's tokens."""

import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels.latent_decode import latent_attention  # noqa: E402
from lockstep.kernels.paged_decode import write_to_cache  # noqa: E402
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
LENGTHS = [1, 2, 17, 75]


class Rows:
    """Rows of these lengths, of which all tokens but the last are cached, and an idle one."""

    def __init__(self, heads: int, rank: int, rope: int, size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(3)
        dim, num_blocks = rank + rope, 4 + sum(LENGTHS) // size + len(LENGTHS)
        self.store = torch.randn(num_blocks, size, dim, device=DEVICE).to(dtype)
        self.tables = torch.zeros(9, 80, dtype=torch.int32)
        self.slot_ids = [3, 0, 7, 5, 8]
        self.query = torch.randn(1, heads, len(LENGTHS) + 1, dim, device=DEVICE).to(dtype)
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

    def decode(self, options: LayerOptions, splits: int, *, written: bool = False) -> torch.Tensor:
        """written: whether the new tokens are in the cache already."""
        slots = torch.tensor([*self.cache_slots, -1], device=DEVICE)
        addresses = torch.tensor([self.store.data_ptr(), 0], device=DEVICE)
        if written:
            write_to_cache(self.key, None, slots, self.size, address=addresses[:1])
        return latent_attention(
            *(self.query, self.key, addresses, self.tables.to(DEVICE)),
            torch.tensor(self.slot_ids, dtype=torch.int32, device=DEVICE),
            torch.tensor([n - 1 for n in LENGTHS] + [0], device=DEVICE),
            torch.full_like(slots, -1) if written else slots,
            latent_dim=self.rank,
            scale=options.scaling,
            window=options.sliding_window,
            chunk=options.chunk,
            softcap=options.softcap,
            sinks=None if options.sinks is None else options.sinks.to(self.query.dtype),
            block_size=self.size,
            splits=splits,
        )

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
    assert_equal(rows.decode(options, splits, written=True), rows.expected(options))


def test_keys_without_numbers_are_not_written() -> None:
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    write_to_cache(torch.zeros(1, 1, 3, 0, device=DEVICE), None, slots, 4, address=slots[:1])
