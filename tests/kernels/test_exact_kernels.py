"""The exact product and attention: right numbers, and rows that do not depend on each other. On CUDA to the bit."""

import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()

from lockstep.kernels.exact_attention import attend  # noqa: E402
from lockstep.kernels.exact_product import SINGLE, Tile, _tiles, by_all_tiles, product  # noqa: E402
from lockstep.models.attention import eager_attention  # noqa: E402
from lockstep.models.layer_options import LayerOptions  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, columns", [(64, 96), (201, 33), (896, 1152)])
def test_product(width: int, columns: int, dtype: torch.dtype) -> None:
    """Row by row the same; on CUDA by tiles of all sizes."""
    torch.manual_seed(0)
    x = torch.randn(600 if DEVICE.type == "cuda" else 150, width, device=DEVICE).to(dtype)
    weight = torch.randn(columns, width, device=DEVICE).to(dtype)
    many = product(x, weight, torch.float32)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(many.double(), expected, rtol=1e-4, atol=1e-4 * width**0.5)
    assert torch.equal(product(x, weight, dtype), many.to(dtype))
    order = torch.randperm(len(x), device=DEVICE)
    assert torch.equal(product(x[order], weight, torch.float32), many[order])
    for few in (slice(3, 4), slice(10, 27), slice(0, 90)):
        assert torch.equal(product(x[few], weight, torch.float32), many[few])
    if dtype != torch.float32:
        assert all(torch.equal(found, many) for found in by_all_tiles(x, weight))


@pytest.mark.parametrize("width", [64, 201])
@pytest.mark.parametrize("tile", [Tile(64, 64, 64, 4, 2), Tile(64, 32, 64, 4, 2, descriptors=True)], ids=str)
def test_product_with_bias_or_added(tile: Tile, width: int) -> None:
    """Rows that begin anywhere, and sums in some columns of a wider tensor."""
    torch.manual_seed(0)
    x, weight = torch.randn(70, width + 3, device=DEVICE)[:, 3:], torch.randn(50, width, device=DEVICE)
    bias, total = torch.randn(50, device=DEVICE), torch.randn(70, 90, device=DEVICE)
    expected = x @ weight.t()
    found = product(x, weight, torch.float32, bias=bias, tile=tile)
    torch.testing.assert_close(found, expected + bias, rtol=1e-4, atol=1e-3)
    wide = total.clone()
    assert product(x, weight, torch.float32, add_to=wide[:, 20:70], scale=0.3, tile=tile).shape == (70, 50)
    total[:, 20:70] += 0.3 * expected
    torch.testing.assert_close(wide, total, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 64, 96, 128, 200])
def test_a_bias_is_added_last(width: int, dtype: torch.dtype) -> None:
    """By tiles of all sizes, also by those that sum in one iteration: row by row the same."""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, width, device=DEVICE).to(dtype) for n in (600, 300))
    bias = torch.randn(300, device=DEVICE).to(dtype)
    tiles = _tiles(DEVICE) if dtype != torch.float32 else SINGLE
    many, *others = (product(x, weight, dtype, bias=bias, tile=tile) for tile in tiles)
    assert all(torch.equal(found, many) for found in others)
    assert torch.equal(product(x[7:8], weight, dtype, bias=bias), many[7:8])
    expected = (product(x, weight, torch.float32) + bias.float()).to(dtype)
    assert torch.equal(many, expected)


def test_columns_of_rows() -> None:
    """An operand that is copied is padded; the other one is not."""
    x, weight = torch.randn(13, 5, device=DEVICE).t(), torch.randn(4, 16, device=DEVICE)
    weight[:, 13:] = float("nan")
    found = product(x, weight[:, :13], torch.float32)
    torch.testing.assert_close(found, x @ weight[:, :13].t(), rtol=1e-5, atol=1e-5)


def test_one_row_of_a_wider_tensor() -> None:
    """A stride of one row says nothing, and is no multiple of the alignment here."""
    x, weight = torch.randn(10, 12, device=DEVICE)[3:4, :8], torch.randn(16, 8, device=DEVICE)
    found = product(x, weight, torch.float32, tile=Tile(64, 32, 64, 4, 2, descriptors=True))
    torch.testing.assert_close(found, x @ weight.t(), rtol=1e-5, atol=1e-5)


OPTIONS = {
    "plain": LayerOptions(0.2),
    "window": LayerOptions(0.2, sliding_window=20),
    "chunk": LayerOptions(0.2, chunk=48),
    "softcap": LayerOptions(0.2, softcap=5.0),
    "sinks": LayerOptions(0.2, sinks=torch.linspace(-1, 3, 6, device=DEVICE)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention(options: LayerOptions, dtype: torch.dtype) -> None:
    """Gathered keys against the reference; single queries over blocks of a cache against the gathered keys."""
    torch.manual_seed(0)
    num_heads, key_heads, dim, length = 6, 2, 24, 151
    query = torch.randn(2, num_heads, 37, dim, device=DEVICE).to(dtype)
    key, value = (torch.randn(2, key_heads, length, dim, device=DEVICE).to(dtype) for _ in range(2))
    positions = torch.stack([torch.arange(37) + first for first in (length - 37, 50)]).to(DEVICE)
    settings = {
        "key_heads": key_heads,
        "value_dim": dim,
        "scale": options.scaling,
        "window": options.sliding_window,
        "chunk": options.chunk,
        "softcap": options.softcap,
        "sinks": options.sinks,
    }
    rows = torch.arange(2, device=DEVICE, dtype=torch.int32)
    out = attend(query, (key, value), rows[:, None], rows, positions, block_size=length, **settings)
    expected = eager_attention(query.float(), key.float(), value.float(), positions, options).transpose(1, 2)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)

    size = 16
    tables = torch.randperm(20, device=DEVICE).view(2, 10).int()
    stores = []
    for gathered in (key, value):
        padded = torch.nn.functional.pad(gathered, (0, 0, 0, 160 - length)).unflatten(2, (10, size))
        store = torch.zeros(20, key_heads, size, dim, device=DEVICE, dtype=dtype)
        store[tables.flatten().long()] = padded.transpose(1, 2).flatten(0, 1)
        stores.append(store.flatten(0, 1))
    for place in (0, 17, 36):
        one = query[:, :, place : place + 1]
        found = attend(one, tuple(stores), tables, rows, positions[:, place, None], block_size=size, **settings)
        assert torch.equal(found[:, 0], out[:, place])
