"""Where the time of an update goes: the kernels of one training step by class, with their FLOP/s.

    python benchmarks/train_profile.py [--shape 1.5b|7b] [--tokens 16384 --length 512] [--micro 1] [--checkpointing]
                                       [--exact] [--json out.json]

The step is that of `train_step.py` (forward, backward, clip, AdamW; random weights). A kernel belongs to the class of the operation
that launched it: the head's products are the head's, though they are matrix products too. Work is what the layers' sizes say,
recomputed layers included; so rates are those that the device really runs at. `host gaps` is when no kernel runs. On CPU the time
is that of torch's operations.
"""

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function
from training_task import Task, add_task_arguments, engine_step, fsdp_engine, synchronize, task_of

from lockstep.engines.train.train_engine import MicroBatching

CLASSES: dict[str, re.Pattern[str]] = {
    "log-prob head": re.compile(r"LinearLogProb|log_softmax|_statistics|logsumexp"),
    "gradient sums": re.compile(r"AccumulateGrad"),
    "optimizer": re.compile(r"adam|Optimizer\.step|optimizer_step|_foreach|multi_tensor|lpnorm", re.I),
    "attention": re.compile(r"flash|fmha|attention|_attend", re.I),
    "products": re.compile(
        r"gemm|gemv|cutlass|nvjet|xmma|wgmma|cublas|splitk|^_product$|^aten::(mm|addmm|addmm_|bmm|linear|matmul)$",
        re.I,
    ),
    "copies": re.compile(r"memcpy|memset|^aten::(copy_|to|_to_copy|contiguous|clone)$", re.I),
}
"""Class -> names of kernels, or of operations around them; the first that matches counts, the rest is `REST`."""
REST = "norms and element-wise"
GAPS = "host gaps"
ANCESTORS_DECIDE = ("log-prob head", "gradient sums", "optimizer")
"""Classes that operations further out decide, too: their kernels are ordinary ones."""


@dataclass
class Part:
    """One class of kernels. flops: of one step; None if its time is not a matter of products."""

    name: str
    ms: float
    count: int
    flops: float | None = None

    @property
    def tflops(self) -> float | None:
        return None if not self.flops or not self.ms else self.flops / self.ms / 1e9


def class_of(names: Iterable[str]) -> str:
    """names: of the kernel, of the operation that launched it, and of those around it, from inside to outside."""
    kernel, operation, *around = [*names, "", ""]
    for name, pattern in CLASSES.items():
        asked = (kernel, operation, *around) if name in ANCESTORS_DECIDE else (kernel, operation)
        if any(pattern.search(text) for text in asked):
            return name
    return REST


def work_of(task: Task, num_recomputed: int) -> dict[str, float]:
    """FLOPs of one step by class. num_recomputed: layers whose forward is computed again in the backward."""
    forwards = 1 + num_recomputed / len(task.layers)
    head = 2 * task.config.vocab_size * task.config.hidden_size * task.num_tokens / 2
    return {
        "products": 2 * task.layer_weights * task.num_tokens * (forwards + 2),
        # the backward of attention has five products, its forward two
        "attention": 2 * task.scores * task.num_tokens * (forwards + 2.5),
        "log-prob head": 3 * head,
    }


def kernels_of(trace: Iterable[dict[str, Any]]) -> Iterator[tuple[list[str], float]]:
    """The kernels of a trace in Chrome's format: names, as `class_of` wants them, and milliseconds."""
    durations: dict[int, tuple[str, float]] = {}  # by correlation
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for event in trace:
        kind, correlation = event.get("cat"), event.get("args", {}).get("correlation")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            durations[correlation] = event["name"], event["dur"] / 1e3
        elif kind in ("cpu_op", "user_annotation") or (kind in ("cuda_runtime", "cuda_driver") and correlation):
            by_thread.setdefault(event["tid"], []).append(event)
    for events in by_thread.values():
        around: list[dict[str, Any]] = []  # from outside to inside
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            if event["cat"] in ("cpu_op", "user_annotation"):
                around.append(event)
            elif (kernel := durations.pop(event["args"]["correlation"], None)) is not None:
                yield [kernel[0], *(outer["name"] for outer in reversed(around))], kernel[1]
    for name, ms in durations.values():
        yield [name], ms


def operations_of(events: Iterable[Any]) -> Iterator[tuple[list[str], float]]:
    """The same of torch's operations on the CPU."""
    for event in events:
        around = [event.name]
        parent = event.cpu_parent
        while parent is not None:
            around.append(parent.name)
            parent = parent.cpu_parent
        yield [event.name, *around], event.self_cpu_time_total / 1e3


def parts_of(found: Iterable[tuple[list[str], float]], wall_ms: float) -> list[Part]:
    """The classes by time, and the time in which nothing ran."""
    spent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for names, ms in found:
        spent[class_of(names)] += ms
        counts[class_of(names)] += 1
    parts = [Part(name, ms, counts[name]) for name, ms in spent.most_common() if ms]
    return [*parts, Part(GAPS, max(0.0, wall_ms - sum(spent.values())), 0)]


def profiled(step: Callable[[], float], device: torch.device) -> tuple[Iterator[tuple[list[str], float]], float]:
    """What one step computes, and its milliseconds without the profiler."""
    for _ in range(2):
        step()
    synchronize(device)
    started = time.perf_counter()
    step()
    synchronize(device)
    wall_ms = (time.perf_counter() - started) * 1e3
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
        synchronize(device)
    if device.type != "cuda":
        return operations_of(profiler.events()), wall_ms
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_text())
    return kernels_of(trace["traceEvents"]), wall_ms


def main(argv: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_arguments(parser, shape="1.5b", cpu_tokens=512)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches of the step")
    parser.add_argument("--exact", action="store_true", help="in exact mode")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if on_gpu else "cpu")
    task = task_of(args, device)
    engine = fsdp_engine(task)
    engine.optimizer_step = record_function("optimizer_step")(engine.optimizer_step)  # type: ignore[method-assign]
    micro = MicroBatching(num_rows=max(1, task.rows // args.micro))
    options = {"exact": True} if args.exact else {}
    found, wall_ms = profiled(engine_step(task, engine, micro, **options), device)
    num_recomputed = 0 if engine.checkpointing is None else engine.checkpointing.num_checkpointed
    parts = parts_of(found, wall_ms)
    for part in parts:
        part.flops = work_of(task, num_recomputed).get(part.name)

    console = Console()
    console.width = max(console.width, 110)
    rows = (
        f"{task.num_tokens} tokens in rows of {task.length}, {num_recomputed} of {len(task.layers)} layers recomputed"
    )
    table = Table(title=f"{args.shape}: {rows}, {wall_ms:.1f} ms per step")
    for column in ("", "ms", "of the step", "kernels", "TFLOP/s", "of the peak"):
        table.add_column(column, justify="right" if column else "left")
    for part in parts:
        rate = ("", "") if part.tflops is None else (f"{part.tflops:.0f}", f"{part.tflops / args.peak_tflops:.0%}")
        table.add_row(part.name, f"{part.ms:.1f}", f"{part.ms / wall_ms:.1%}", str(part.count or ""), *rate)
    total = task.flops() / wall_ms / 1e9
    table.add_row(
        "the step, required work", f"{wall_ms:.1f}", "", "", f"{total:.0f}", f"{total / args.peak_tflops:.0%}"
    )
    console.print(table)
    if args.json:
        classes = {part.name: asdict(part) | {"tflops": part.tflops} for part in parts}
        summary = {
            "shape": args.shape,
            "tokens": task.num_tokens,
            "length": task.length,
            "ms": wall_ms,
            "tflops": total,
        }
        args.json.write_text(json.dumps(summary | {"recomputed": num_recomputed, "parts": classes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
