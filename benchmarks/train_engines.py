"""One training step of the same random model by the FSDP and the Megatron engine, on one device.

    python benchmarks/train_engines.py [--shape 1.5b] [--tokens 16384 --length 512] [--checkpointing] [--json out.json]

The task, the loss and the measurement are those of `train_step.py`: float32 master weights, bfloat16 compute on CUDA, packed rows,
log-probs at response tokens, gradient clipping and AdamW. Megatron has tensor and pipeline parallelism of 1.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from rich.console import Console
from training_task import Task, add_task_arguments, engine_step, free, fsdp_step, measure, print_kernels, task_of

from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train import EngineModel, create_train_engine


def megatron_step(task: Task) -> Callable[[], float]:
    with tempfile.TemporaryDirectory() as folder:
        model = task.model(torch.bfloat16)
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
    return engine_step(task, engine)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_arguments(parser, shape="1.5b")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--entropy", action="store_true", help="with an entropy bonus in the loss")
    parser.add_argument("--only", choices=["fsdp", "megatron"], help="run only one engine")
    parser.add_argument("--profile", action="store_true", help="print Megatron's longest kernels")
    args = parser.parse_args()

    device = torch.device("cuda" if on_gpu else "cpu")
    task = replace(task_of(args, device, entropy=args.entropy), master=torch.float32)
    console = Console(width=120)
    makers = {"fsdp": fsdp_step, "megatron": megatron_step}
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
