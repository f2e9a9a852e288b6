"""The matrix products of exact mode on a GPU, by size of their tiles, compared with those of torch.

    python benchmarks/exact_products.py [--shape 0.5b 7b] [--rows 16 128 256 8192] [--top 4] [--json out.json]

For each product of a decoder layer: microseconds of torch's, of the one that exact mode computes ("now"), and of the fastest
tiles with the same bits; results are in float32. Tiles with other bits, and those for which the device has no room, are counted.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, shape_config
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lockstep.kernels.exact_product import Tile, product

MEMORY = 220 << 10
"""Shared memory of a program that loads ahead."""
MANY_ROWS = 512
"""From this many rows on, large tiles are tried."""


def tiles_for(num_rows: int) -> list[Tile]:
    """Those worth compiling, which takes most of the time here."""
    if num_rows >= MANY_ROWS:
        sizes = itertools.product((128,), (128, 256), (64,), (8,), (3, 4), (False, True))
    else:
        sizes = itertools.product((64, 128), (32, 64, 128), (64, 128), (4,), (4,), (False, True))
    tiles = (Tile(*size) for size in sizes)
    return [tile for tile in tiles if 2 * (tile.rows + tile.columns) * tile.inner * tile.stages <= MEMORY]


def products_of(shape: str) -> dict[str, tuple[int, int]]:
    """Rows and columns of the weights of a layer."""
    config = shape_config(shape)
    dim = config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        "qkv": (queries + 2 * keys, config.hidden_size),
        "o": (config.hidden_size, queries),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }


def microseconds(compute: Callable[[], Tensor], repeats: int = 20) -> float:
    """Of one call in a CUDA graph, with weights that are no longer in the cache."""
    compute()
    graph = torch.cuda.CUDAGraph()
    flush = torch.empty(64 << 20, dtype=torch.int8, device="cuda")
    with torch.cuda.graph(graph):
        compute()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for began, ended in events:
        flush.zero_()
        began.record()
        graph.replay()
        ended.record()
    torch.cuda.synchronize()
    return 1e3 * sorted(began.elapsed_time(ended) for began, ended in events)[repeats // 2]


def measure(rows: int, weight: Tensor, top: int) -> dict[str, Any]:
    x = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
    now = partial(product, x, weight, torch.float32)
    expected = now()
    found: list[tuple[float, Tile]] = []
    num_other = num_large = 0
    for tile in tiles_for(rows):
        compute = partial(now, tile=tile)
        try:
            if torch.equal(compute(), expected):
                found.append((microseconds(compute), tile))
            else:
                num_other += 1
        except OutOfResources:
            num_large += 1
    found.sort(key=lambda entry: entry[0])
    return {
        "torch_us": microseconds(lambda: torch.mm(x, weight.t(), out_dtype=torch.float32)),
        "now_us": microseconds(now),
        "best": [{"us": us, **vars(tile)} for us, tile in found[:top]],
        "other_bits": num_other,
        "too_large": num_large,
    }


def label(tile: dict[str, Any]) -> str:
    loads = ", descriptors" if tile["descriptors"] else ""
    size = f"{tile['rows']}x{tile['columns']}x{tile['inner']}"
    return f"({size}, {tile['warps']} warps, {tile['stages']} stages{loads})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["0.5b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128, 256, 8192])
    parser.add_argument("--top", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    results = []
    named = [(shape, name, size) for shape in args.shape for name, size in products_of(shape).items()]
    for shape, name, (columns, width) in named:
        weight = torch.randn(columns, width, device="cuda").to(torch.bfloat16)
        for rows in args.rows:
            found = measure(rows, weight, args.top)
            results.append({"shape": shape, "product": name, "rows": rows, **found})
            best = "  ".join(f"{b['us']:.1f} {label(b)}" for b in found["best"])
            print(
                f"{shape} {name:8} {rows:5} rows: torch {found['torch_us']:.1f} us, now {found['now_us']:.1f}; {best}; "
                f"other bits {found['other_bits']}, too large {found['too_large']}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
