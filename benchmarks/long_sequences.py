"""GRPO on responses of 32k tokens, on one GPU: time of generation and update, measured and planned peak memory.

    python benchmarks/long_sequences.py [--run 1.5b --run 7b-lora] [--peer trl+vllm --peer-python .trl/bin/python]
                                        [--steps 1] [--json out.json] [key=value ...]

A run is a step of 8 prompts with 4 samples each, with random weights and random rewards. The stop token is ignored, so that all
responses have `--new-tokens` tokens. A micro-batch has one sequence. Both sides checkpoint the gradient; the peer trains as many
parameters. What a peer reports if it fails, such as out of memory, is part of the result. The peer `trl-update` generates nothing:
its responses are random tokens, so that its step is an update alone.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from grpo_step import make_model_in_subprocess, make_prompts, run_lockstep, run_trl
from peers import Figures, PeerError
from rich.console import Console
from rich.table import Table

PHASES = {"gen": "generate", "update_actor": "update actor"}
"""Phase in the run's metrics -> phase of the plan."""


@dataclass(frozen=True)
class Run:
    """lora_rank: 0 trains all parameters."""

    shape: str
    lora_rank: int = 0


RUNS = {
    "tiny": Run("tiny"),
    "tiny-lora": Run("tiny", 8),
    "1.5b": Run("1.5b"),
    "7b-lora": Run("7b", 32),
}


def settings_of(run: Run, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of `grpo_step.py`."""
    tokens = args.prompt_tokens + 64 + args.new_tokens
    return argparse.Namespace(
        **vars(args),
        shape=run.shape,
        lora_rank=run.lora_rank,
        full_length=True,
        checkpointing=True,
        auto_micro=False,
        max_tokens=tokens,
        peer_micro=1,
        master_dtype="float32",
        optimizer_offload=args.offload,
    )


def lockstep_figures(folder: Path, model: Path, texts: list[str], args: argparse.Namespace) -> Figures:
    """Seconds and peaks of the phases; `planned_gb/…` if there is a plan."""
    utilization = f"actor_rollout_ref.rollout.gpu_memory_utilization={args.utilization}"
    args.overrides = [utilization, *args.overrides]
    figures = run_lockstep(folder, model, texts, args)
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    plan = folder / "run" / "plan.json"
    planned = json.loads(plan.read_text())["memory_gb"] if plan.exists() else {}
    figures["length"] = last["response_length/mean"]
    for name, phase in PHASES.items():
        peak = last.get(f"perf/max_memory_allocated_gb/{name}")
        figures |= {} if peak is None else {f"peak_gb/{name}": peak * 2**30 / 1e9}
        figures |= {f"planned_gb/{name}": planned[phase]} if phase in planned else {}
    return figures


def peer_figures(
    name: str, folder: Path, model: Path, texts: list[str], args: argparse.Namespace
) -> tuple[Figures, str | None]:
    """Its figures, or the last line that it printed."""
    try:
        return run_trl(folder, model, texts, args, vllm=name == "trl+vllm", update_only=name == "trl-update"), None
    except (PeerError, OSError, ValueError, KeyError, IndexError) as error:
        lines = (str(error) or repr(error)).splitlines()
        memory = [line for line in lines if "out of memory" in line.lower()]
        return {}, (memory or lines)[-1]


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Side -> figures, or {"failed": why}."""
    run = RUNS[name]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model_in_subprocess(folder / "model", run.shape)
        texts = make_prompts(model, 4 * args.prompts, args.prompt_tokens)
        if not args.only_peer:
            found["lockstep"] = lockstep_figures(folder, model, texts, settings_of(run, args))
        for peer in args.peer:
            figures, failure = peer_figures(peer, folder, model, texts, settings_of(run, args))
            found[peer] = figures if failure is None else {"failed": failure}
    return found


def show(console: Console, name: str, sides: dict[str, Any], args: argparse.Namespace) -> None:
    run = RUNS[name]
    how = f"LoRA of rank {run.lora_rank}" if run.lora_rank else "all parameters"
    size = f"{args.prompts} x {args.samples} responses of {args.new_tokens:,} tokens"
    table = Table("", "step s", "generation s", "update s", "peak GB", title=f"{name} ({how}), {size}")
    for side, figures in sides.items():
        if "failed" in figures:
            table.add_row(side, "failed", "", "", "")
            console.print(f"{side}: {figures['failed']}", markup=False, soft_wrap=True)
            continue
        parts = (f"{figures[key]:.1f}" if key in figures else "" for key in ("step_s", "gen_s", "update_actor_s"))
        table.add_row(side, *parts, f"{figures['peak_gb']:.1f}")
    console.print(table)
    for phase in PHASES:
        peak, planned = (sides.get("lockstep", {}).get(f"{kind}_gb/{phase}") for kind in ("peak", "planned"))
        if peak is not None and planned is not None:
            console.print(f"{phase}: {peak:.1f} GB, planned {planned:.1f} GB ({planned / peak - 1:+.1%})", markup=False)


def main(argv: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", choices=sorted(RUNS), help="default: 1.5b and 7b-lora; tiny on CPU")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32768 if on_gpu else 64)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--utilization", type=float, default=0.8, help="of Lockstep's rollout: weights and KV cache")
    parser.add_argument(
        "--offload", action="store_true", help="Lockstep's optimizer state on the host, all layers recomputed"
    )
    parser.add_argument("--peer", action="append", choices=["trl", "trl+vllm", "trl-update"], default=[])
    parser.add_argument("--only-peer", action="store_true", help="do not run Lockstep")
    parser.add_argument("--peer-setting", action="append", default=[], help="KEY=JSON: a field of TRL's GRPOConfig")
    parser.add_argument("--vllm-setting", action="append", default=[], help="KEY=JSON: an argument of TRL's vLLM")
    parser.add_argument("--peer-python", default=sys.executable, help="Python interpreter of the environment with TRL")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("overrides", nargs="*", help="of the Lockstep run")
    args = parser.parse_args(argv)
    console = Console()
    console.width = max(console.width, 110)
    results = {}
    for name in args.run or (["1.5b", "7b-lora"] if on_gpu else ["tiny"]):
        results[name] = measure(name, args)
        show(console, name, results[name], args)
        if args.json:  # after each run: one of several may take hours
            sides = [side for found in results.values() for side in found.items()]
            failures = {side: figures["failed"] for side, figures in sides if "failed" in figures}
            content = {"arguments": vars(args), "results": results, "failures": failures}
            args.json.write_text(json.dumps(content, indent=1, default=str))


if __name__ == "__main__":
    main()
