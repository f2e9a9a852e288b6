"""One training step (forward, backward, clip, AdamW) on random weights: Lockstep's engine compared with plain transformers.

    python benchmarks/train_step.py [--shape 0.5b|1.5b|7b] [--tokens 16384 --length 512] [--profile] [--json out.json]

Rows have `length` tokens, the second half of which is the response. lockstep: `FsdpEngine` with `PolicyModel` (packed, log-probs at
response tokens). transformers: sdpa attention on the same rows, log-softmax of the full logits, gather. Both compute in bfloat16 on
CUDA with the same loss, gradient clipping and AdamW. Lockstep's master weights are float32, transformers' have the compute dtype;
for shapes whose float32 optimizer does not fit on one device, both are bfloat16. MFU is relative to `--peak-tflops` and counts only
required work (the head at response tokens only, no recomputation).
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from training_task import Task, add_task_arguments, free, fsdp_step, measure, print_kernels, task_of


def transformers_step(task: Task) -> Callable[[], float]:
    model = task.model(task.dtype).train()
    if task.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)
    batch = task.batch().to(task.device)
    half, total = task.length // 2, task.num_tokens / 2

    def step() -> float:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        log_p = torch.log_softmax(logits[:, :-1].float(), -1)
        chosen = log_p.gather(-1, batch["input_ids"][:, 1:, None])[:, half - 1 :, 0]
        loss = -(chosen * batch["advantages"]).sum() / total
        if task.entropy:
            loss = loss + 0.001 * (log_p.exp() * log_p).sum(-1)[:, half - 1 :].sum() / total
        del logits, log_p
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_arguments(parser, shape="0.5b")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--entropy", action="store_true", help="with an entropy bonus in the loss")
    parser.add_argument("--only", choices=["lockstep", "transformers"], help="run only one side")
    parser.add_argument("--profile", action="store_true", help="print Lockstep's longest kernels")
    args = parser.parse_args()

    device = torch.device(args.device)
    task = task_of(args, device, entropy=args.entropy)
    console = Console()
    console.width = max(console.width, 120)
    makers = {"lockstep": fsdp_step, "transformers": transformers_step}
    results = []
    for name, make in makers.items():
        if args.only in (None, name):
            results.append(measure(name, task, make, args.steps, args.peak_tflops))
            free()

    title = f"{args.shape}: {task.num_tokens} tokens in rows of {task.length}, half response, {task.dtype} on {device}"
    table = Table(title=title)
    for column in ("", "tokens/s", "ms", "MFU", "peak GB", "start + 3 steps s"):
        table.add_column(column, justify="right" if column else "left")
    for r in results:
        table.add_row(
            r.name, f"{r.tokens_per_s:,.0f}", f"{r.ms:.1f}", f"{r.mfu:.1%}", f"{r.peak_gb:.1f}", f"{r.warmup_s:.1f}"
        )
    console.print(table)
    summary: dict[str, Any] = {
        "shape": args.shape,
        "tokens": task.num_tokens,
        "length": task.length,
        "device": str(device),
        "dtype": str(task.dtype),
        "master": str(task.master),
        "checkpointing": task.checkpointing,
        "entropy": task.entropy,
        "torch": torch.__version__,
        "results": [asdict(r) for r in results],
    }
    if len(results) == len(makers):
        summary["ratio"] = results[0].tokens_per_s / results[1].tokens_per_s
        console.print(f"lockstep / transformers: {summary['ratio']:.2f}x")
    if args.profile and device.type == "cuda":
        print_kernels(console, fsdp_step(task), 12)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
