"""What the audits of an update cost: seconds of each, and their share of the update, on random weights.

    python benchmarks/audit_cost.py [--shape 0.5b|1.5b|7b] [--rows 64 --length 512] [--updates 20] [--json out.json]

An update has one mini-batch of `rows` sequences, the second half of which is the response: forward, backward, clip, AdamW. Each
audit is timed with the device synchronised before and after it. split: a comparison of micro-batches, which runs in the first two
updates and then so seldom that it has 0.2 % of the rows. A step of RL also generates and scores, so the shares there are smaller.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shapes import BFLOAT16_MASTERS, SHAPES, shape_config
from training_task import Task, fsdp_engine, synchronize

from lockstep.engines.train.audit import ReferenceAudit, UpdateAudit
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.model_check import check_batch


class Timer:
    """Seconds of each call, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        synchronize(self._device)
        start = time.perf_counter()
        result = call()
        synchronize(self._device)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result


def measure(task: Task, updates: int) -> dict[str, Any]:
    engine, timed = fsdp_engine(task), Timer(task.device)
    audit = UpdateAudit(engine, task.dtype, task.device, clip_grad=1.0)
    module = engine.rollout_module()
    batch, micro = task.batch(), MicroBatching()
    levels = {"weights": "stop"}
    for number in range(updates):
        timed("begin", lambda: audit.begin(levels, 1))
        timed("split", lambda: audit.check_split(batch, task.loss, micro))
        timed("gradient of the update", lambda: engine.forward_backward(batch, task.loss, micro))
        timed("optimizer step", lambda: audit.optimizer_step(expects_gradient=True))
        engine.schedule_step()
        timed("end", audit.end)
        with engine.lend_weights(module):
            timed("lent weights", lambda version=number: audit.check_lent(module, version))
    splits = timed.seconds.pop("split")
    parts = {name: statistics.median(values[2:]) for name, values in timed.seconds.items()}
    update = parts["gradient of the update"] + parts["optimizer step"]
    audits = parts["begin"] + parts["end"] + parts["lent weights"]
    found: dict[str, Any] = {name: f"{1e3 * seconds:.3f} ms" for name, seconds in parts.items()}
    found["first baseline of frozen tensors"] = f"{1e3 * timed.seconds['begin'][0]:.1f} ms"
    found["one comparison of splits"] = f"{1e3 * splits[1]:.1f} ms"
    found |= {"audits per update": f"{1e3 * audits:.3f} ms", "share of the update": f"{100 * audits / update:.3f} %"}
    return found


def measure_reference(task: Task) -> dict[str, Any]:
    reference, timed = fsdp_engine(replace(task, checkpointing=False), trained=False), Timer(task.device)
    checks, rows = ReferenceAudit(reference, task.dtype, has_own_weights=True), check_batch(task.config.vocab_size)
    for _ in range(2 * checks.EVERY + 1):
        timed("reference", lambda: checks.check({}, rows))
    seconds = timed.seconds["reference"][1:]
    return {
        "reference per pass, with its fixed rows every 20th time": f"{1e3 * statistics.mean(seconds):.3f} ms",
        "first baseline of the reference": f"{1e3 * timed.seconds['reference'][0]:.1f} ms",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    dtype = torch.bfloat16 if is_cuda else torch.float32
    master = torch.bfloat16 if args.shape in BFLOAT16_MASTERS else torch.float32
    config = shape_config(args.shape)
    task = Task(config, args.rows, args.length, device, dtype, master, checkpointing=True, entropy=False)
    found = measure(task, args.updates) | measure_reference(task)
    for name, value in found.items():
        print(f"{name:60}{value:>14}")
    if args.json:
        args.json.write_text(json.dumps({"shape": args.shape, "device": device.type, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
