"""One training step of the same random model by the FSDP and the Megatron engine, on one device.

    python benchmarks/train_engines.py [--shape 1.5b] [--tokens 16384 --length 512] [--checkpointing] [--json out.json]

The task, the loss and the measurement are those of `train_step.py`: float32 master weights, bfloat16 compute on CUDA, packed rows,
log-probs at response tokens, gradient clipping and AdamW. Megatron has tensor and pipeline parallelism of 1.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from shapes import SHAPES, shape_config
from tensordict import TensorDict
from torch import Tensor
from train_step import Task, free, lockstep_step, measure, print_kernels

from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train import EngineModel, MicroBatching, create_train_engine


def megatron_step(task: Task) -> Callable[[], float]:
    with tempfile.TemporaryDirectory() as folder:
        model = task.model(torch.bfloat16, "sdpa")
        model.save_pretrained(folder)
        del model
        free()
        spec = EngineModel(
            HFModelConfig(path=folder, enable_gradient_checkpointing=task.checkpointing),
            "actor_rollout_ref.model",
            "policy",
            McoreEngineConfig(),
            optim=FSDPOptimizerConfig(),
        )
        engine = create_train_engine("megatron", spec, task.device)
    batch, total = task.batch(), task.num_tokens / 2

    def loss(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        value = -(outputs["log_probs"] * rows["advantages"]).sum() / total
        if task.entropy:
            value = value - 0.001 * outputs["entropy"].sum() / total
        return value, {"loss": value.detach()}

    def step() -> float:
        metrics = engine.forward_backward(batch, loss, MicroBatching(), with_entropy=task.entropy)
        engine.optimizer_step()
        return metrics["loss"]

    return step


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.5b" if on_gpu else "tiny")
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else 1024)
    parser.add_argument("--length", type=int, default=512 if on_gpu else 128, help="tokens per row")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--entropy", action="store_true", help="with an entropy bonus in the loss")
    parser.add_argument("--only", choices=["fsdp", "megatron"], help="run only one engine")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="peak matmul throughput, for MFU")
    parser.add_argument("--profile", action="store_true", help="print Megatron's longest kernels")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()

    device = torch.device("cuda" if on_gpu else "cpu")
    task = Task(
        config=shape_config(args.shape, rope_theta=1e6),
        rows=args.tokens // args.length,
        length=args.length,
        device=device,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        master=torch.float32,
        checkpointing=args.checkpointing,
        entropy=args.entropy,
    )
    console = Console(width=120)
    makers = {"fsdp": lockstep_step, "megatron": megatron_step}
    results = []
    for name, make in makers.items():
        if args.only in (None, name):
            results.append(measure(name, task, make, args.steps, args.peak_tflops))
            free()
            r = results[-1]
            console.print(
                f"{name:<10} {r.tokens_per_s:,.0f} tokens/s, {r.ms:.1f} ms, MFU {r.mfu:.1%}, {r.peak_gb:.1f} GB, "
                f"start and 3 steps {r.warmup_s:.1f} s"
            )
    summary = {
        "shape": args.shape,
        "tokens": task.num_tokens,
        "length": task.length,
        "checkpointing": task.checkpointing,
    }
    summary |= {"torch": torch.__version__, "results": [asdict(r) for r in results]}
    if len(results) == len(makers):
        summary["ratio"] = results[1].ms / results[0].ms
        console.print(f"megatron / fsdp: {summary['ratio']:.2f}x of the time")
    if args.profile and on_gpu:
        print_kernels(console, megatron_step(task), 16)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
