"""One block of experts (router, experts, weighted sum) on random weights: our grouped products, transformers' and its loop.

    python benchmarks/moe_step.py [--shape tiny|qwen3-30b-a3b|mixtral-8x7b] [--device cuda] [--tokens 8192] [--batch 1 16 64 256]
    python benchmarks/moe_step.py --decode [--shape qwen3-30b-a3b|mixtral-8x7b] [--batch 1 8 32 64 128 256 512]

train: forward and backward of `--tokens` tokens. decode: forward of a batch of single tokens without gradients; on CUDA as a graph
if the implementation can be captured, which the table says. The ratio is the loop's time (before) divided by ours (after). bfloat16
on CUDA, float32 on a CPU. It simplifies: random routers, so the load is even.

--decode compares the two forms of our experts on a CUDA device, without the router: grouped products and tiles of rows
(`kernels/expert_decode.py`). A graph has the calls of several batches, so that the weights of few tokens are not found in the
cache. The last column divides the weights of the chosen experts by the time of the tiles: at best the memory's bandwidth.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from shapes import EXPERT_SHAPES
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from lockstep.models import experts
from lockstep.models.experts import EXPERTS_NAME

IMPLEMENTATIONS = {"loop": "eager", "transformers": "grouped_mm", "ours": EXPERTS_NAME}
"""Name in the table -> `experts_implementation`."""
FORMS = {"grouped": 0, "tiles": 1 << 30}
"""Name in the table -> rows per expert up to which tiles compute."""
CALLS_PER_GRAPH = 8
"""Of --decode."""


def random_block(shape: str, device: torch.device, dtype: torch.dtype) -> Qwen3MoeSparseMoeBlock:
    with device:
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**EXPERT_SHAPES[shape])).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return block


def median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= 2:
            times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def train_call(block: Qwen3MoeSparseMoeBlock, x: Tensor) -> Callable[[], object]:
    x = x.requires_grad_()
    grad = torch.ones_like(x) / len(x[0])

    def call() -> None:
        block.zero_grad()
        block(x).backward(grad)

    return call


def decode_call(block: Qwen3MoeSparseMoeBlock, x: Tensor) -> tuple[Callable[[], object], bool]:
    """What computes a decode step, and whether it is a CUDA graph."""
    return captured(lambda: block(x)) if x.is_cuda else (torch.no_grad()(lambda: block(x)), False)


def captured(compute: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """The computation on CUDA without gradients, and whether it is a graph."""
    call = torch.no_grad()(compute)
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:  # it waits for the device
        return call, False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay, True


def measure(shape: str, num_tokens: int, train: bool, device: torch.device, repeats: int) -> str:
    """A row of the table."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    block = random_block(shape, device, dtype)
    x = torch.randn(1, num_tokens, EXPERT_SHAPES[shape]["hidden_size"], device=device, dtype=dtype)
    times = {}
    cells = []
    for name, implementation in IMPLEMENTATIONS.items():
        block.experts.config._experts_implementation = implementation
        call, is_graph = (train_call(block, x), False) if train else decode_call(block, x)
        times[name] = median_ms(call, device, repeats)
        cells.append(f"{times[name]:.2f} ms{' (graph)' if is_graph else ''}")
    task = f"train {num_tokens} tokens" if train else f"decode {num_tokens}"
    return f"| {shape} | {task} | {' | '.join(cells)} | {times['loop'] / times['ours']:.2f} |"


def compare_forms(shape: str, num_tokens: int, device: torch.device, repeats: int) -> str:
    """A row of the table of --decode."""
    block = random_block(shape, device, torch.bfloat16)
    block.experts.config._experts_implementation = EXPERTS_NAME
    inputs = []
    num_chosen = 0
    for _ in range(CALLS_PER_GRAPH):
        x = torch.randn(num_tokens, EXPERT_SHAPES[shape]["hidden_size"], device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            _, weights, chosen = block.gate(x)
        num_chosen += len(chosen.unique())
        inputs.append((x, chosen, weights))
    times = {}
    cells = []
    for name, rows in FORMS.items():
        experts.FEW_ROWS = experts.FEW_ROWS_OR_LOOP = rows
        call, is_graph = captured(lambda: [block.experts(*arguments) for arguments in inputs])
        times[name] = median_ms(call, device, repeats) / CALLS_PER_GRAPH
        cells.append(f"{times[name]:.3f} ms{' (graph)' if is_graph else ''}")
    bytes_per_expert = sum(p[0].nbytes for p in block.experts.parameters())
    rate = num_chosen * bytes_per_expert / CALLS_PER_GRAPH / times["tiles"] / 1e6
    return (
        f"| {shape} | {num_tokens} | {' | '.join(cells)} | {times['grouped'] / times['tiles']:.2f} | {rate:.0f} GB/s |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=EXPERT_SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1024, help="of a training step")
    parser.add_argument("--decode", action="store_true", help="compare the forms of our experts; needs CUDA")
    parser.add_argument("--batch", type=int, nargs="+", help="tokens of a decode step")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.decode:
        if device.type != "cuda":
            parser.error("--decode needs a CUDA device")
        print(f"| shape | tokens | {' | '.join(FORMS)} | grouped / tiles | weights |\n|---|---|{'---|' * 4}")
        for size in args.batch or [1, 8, 32, 64, 128, 256, 512]:
            print(compare_forms(args.shape, size, device, args.repeats), flush=True)
        return 0
    print(f"| shape | task | {' | '.join(IMPLEMENTATIONS)} | loop / ours |\n|---|---|{'---|' * 4}")
    print(measure(args.shape, args.tokens, True, device, args.repeats), flush=True)
    for size in args.batch or [1, 16, 64]:
        print(measure(args.shape, size, False, device, args.repeats), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
