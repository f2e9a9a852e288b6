"""Where the time of a rollout goes: prefill and decode steps, and their kernels.

    python benchmarks/rollout_profile.py --shape hybrid-1.5b [--requests 128 --prompt-tokens 256 --new-tokens 256]
                                         [--drafts] [--exact] [--top 20] [--json out.json]

The requests, engine and random weights are those of `rollout.py`. Each launch waits for the device, so its seconds are its own;
`between launches` is the host's work, most of which a usual rollout does while the device computes. The kernels are those of the
first prefill step and of a window of decode steps with all sequences, both after a run that compiles and captures. On CPU the time
is that of torch's operations, and their number per layer is that of a whole step divided by the layers.

--drafts generates with drafts from history, of which all are right: steps with drafts are a phase of their own.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rollout import Case, embedded_engine, embedded_requests, make_requests, span
from shapes import SHAPES, zero_logits
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lockstep.config.actor_rollout_ref import HistoryDraftsConfig


@dataclass
class Phase:
    """seconds, steps: of a whole rollout. kernels, counts: milliseconds and number by name, of the profiled launch with
    `profiled_steps` steps."""

    seconds: float = 0.0
    steps: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    profiled_steps: int = 1

    @property
    def kernel_ms(self) -> float:
        """Of one step, under the profiler."""
        return sum(self.kernels.values()) / self.profiled_steps


class LaunchProfile:
    """Takes the place of the launches of an engine's step loop, and measures them.

    profiled: phases whose next launch with enough rows is profiled, and how many rows that is.
    """

    def __init__(self, loop: Any, device: str) -> None:
        self.loop = loop
        self.device = device
        self.profiled: dict[str, int] = {}
        self.clear()
        prefill, window = loop._run_prefill, loop._run_window
        loop._run_prefill = lambda step, *args: self._launch("prefill", step, lambda: prefill(step, *args))
        loop._run_window = lambda step, *args: self._launch("decode", step, lambda: window(step, *args))

    def clear(self) -> None:
        self.phases = {name: Phase() for name in ("prefill", "decode", "drafts")}

    def _launch(self, name: str, step: Any, launch: Callable[[], None]) -> None:
        name = "drafts" if name == "decode" and step.has_drafts else name
        phase = self.phases[name]
        if len(step.rows) >= self.profiled.get(name, sys.maxsize):
            del self.profiled[name]
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device == "cuda" else [])]
            with profile(activities=activities) as profiler:
                self._timed(phase, launch)
            phase.profiled_steps = self._last_steps(name)
            self._add_kernels(phase, profiler.events())
        else:
            self._timed(phase, launch)
        phase.steps += self._last_steps(name)

    def _last_steps(self, name: str) -> int:
        return 1 if name == "prefill" else int(self.loop._in_flight[-1].num_steps)

    def _timed(self, phase: Phase, launch: Callable[[], None]) -> None:
        self._synchronize()
        started = time.perf_counter()
        launch()
        self._synchronize()
        phase.seconds += time.perf_counter() - started

    def _add_kernels(self, phase: Phase, events: Any) -> None:
        for event in events:
            if self.device == "cuda" and event.device_type == DeviceType.CUDA:
                spent = event.time_range.elapsed_us()
            elif self.device == "cpu":
                spent = event.self_cpu_time_total
            else:
                continue
            phase.kernels[event.name] += spent / 1e3
            phase.counts[event.name] += 1

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    case = Case(args.shape, args.requests, span(args.prompt_tokens), span(args.new_tokens))
    drafts = HistoryDraftsConfig(enable=args.drafts)
    engine, model = embedded_engine(args, case, history_drafts=drafts, exact=args.exact)
    if args.drafts:
        zero_logits(model)
    requests = embedded_requests(make_requests(case, model.config.vocab_size, args.seed), greedy=False)
    engine.generate(requests)
    started = time.perf_counter()
    engine.generate(requests)
    usual_s = time.perf_counter() - started
    profiled = LaunchProfile(engine.step_loop, args.device)
    started = time.perf_counter()
    engine.generate(requests)
    total_s = time.perf_counter() - started
    times = profiled.phases
    profiled.clear()
    profiled.profiled = {"prefill": 1, "decode": args.requests, "drafts": 1}
    engine.generate(requests)
    found: dict[str, Any] = {"layers": model.config.num_hidden_layers, "usual_s": usual_s}
    for name, phase in profiled.phases.items():
        timed = times[name]
        if not timed.steps:
            continue
        kernels = {
            kernel: {"ms": ms / phase.profiled_steps, "count": phase.counts[kernel] / phase.profiled_steps}
            for kernel, ms in phase.kernels.most_common()
        }
        found[name] = {
            "seconds": timed.seconds,
            "steps": timed.steps,
            "step_ms": 1e3 * timed.seconds / timed.steps,
            "kernel_ms": phase.kernel_ms,
            "kernels": kernels,
        }
    found["between_s"] = total_s - sum(phase.seconds for phase in times.values())
    return found


def show(console: Console, found: dict[str, Any], args: argparse.Namespace) -> None:
    size = f"{args.requests} requests of {args.prompt_tokens} + {args.new_tokens} tokens"
    console.print(
        f"{args.shape}, {size}: {found['usual_s']:.3f} s; with launches that wait for the device:", markup=False
    )
    phases = [name for name in ("prefill", "decode", "drafts") if name in found]
    if args.drafts and "drafts" not in found:
        console.print("  no step had drafts: plain steps were faster")
    for name in phases:
        phase = found[name]
        steps = f"{phase['steps']} steps of {phase['step_ms']:.2f} ms"
        console.print(f"  {name:7} {phase['seconds']:.3f} s, {steps}, of it kernels {phase['kernel_ms']:.2f} ms")
    console.print(f"  between launches {found['between_s']:.3f} s")
    for name in phases:
        table = Table("ms", "of the kernels", "count", "per layer", "", title=f"{name}: one step")
        phase = found[name]
        for kernel, entry in list(phase["kernels"].items())[: args.top]:
            share, per_layer = entry["ms"] / phase["kernel_ms"], entry["count"] / found["layers"]
            table.add_row(
                f"{entry['ms']:.3f}", f"{share:.1%}", f"{entry['count']:.0f}", f"{per_layer:.1f}", kernel[:100]
            )
        console.print(table)


def main(argv: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b" if on_gpu else "tiny")
    parser.add_argument("--requests", type=int, default=128 if on_gpu else 8)
    parser.add_argument("--prompt-tokens", default="256" if on_gpu else "16", help="per request, N or N-M")
    parser.add_argument("--new-tokens", default="256" if on_gpu else "32", help="per request, N or N-M")
    parser.add_argument("--prefill-tokens", type=int, default=16384, help="tokens per prefill step")
    parser.add_argument("--drafts", action="store_true", help="draft from a history that is right")
    parser.add_argument("--exact", action="store_true", help="in exact mode")
    parser.add_argument("--top", type=int, default=20, help="kernels that are shown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(argv)
    args.device, args.dtype, args.model = ("cuda", "bfloat16", None) if on_gpu else ("cpu", "float32", None)
    console = Console()
    console.width = max(console.width, 140)
    found = measure(args)
    show(console, found, args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
