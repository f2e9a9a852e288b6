"""One block of experts (router, experts, weighted sum) on random weights: our grouped products, transformers' and its loop.

    python benchmarks/moe_step.py [--shape tiny|qwen3-30b-a3b|mixtral-8x7b] [--device cuda] [--tokens 8192] [--batch 1 16 64 256]

train: forward and backward of `--tokens` tokens. decode: forward of a batch of single tokens without gradients; on CUDA as a graph
if the implementation can be captured, which the table says. The ratio is the loop's time (before) divided by ours (after). bfloat16
on CUDA, float32 on a CPU. It simplifies: random routers, so the load is even.
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

from lockstep.models.experts import EXPERTS_NAME

IMPLEMENTATIONS = {"loop": "eager", "transformers": "grouped_mm", "ours": EXPERTS_NAME}
"""Name in the table -> `experts_implementation`."""


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

    @torch.no_grad()
    def call() -> Tensor:
        out: Tensor = block(x)
        return out

    if not x.is_cuda:
        return call, False
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=EXPERT_SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1024, help="of a training step")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], help="tokens of a decode step")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    print(f"| shape | task | {' | '.join(IMPLEMENTATIONS)} | loop / ours |\n|---|---|{'---|' * 4}")
    print(measure(args.shape, args.tokens, True, device, args.repeats), flush=True)
    for size in args.batch:
        print(measure(args.shape, size, False, device, args.repeats), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
