"""The figures of docs/performance.md and other pages: run the benchmarks on this machine, keep the results, write the tables.

    python benchmarks/report.py [--only NAME ...]      run those that this machine can run, or only the named ones; write the tables
    python benchmarks/report.py --list                 the names, their commands, and when each was measured
    python benchmarks/report.py --tables               only write the tables from the stored results
    ... --vllm-python .vllm/bin/python --trl-python .trl/bin/python    peers in environments of their own

    command ─► its JSON ─► results/{cpu,gpu}.json ─► tables between `<!-- report NAME -->` and `<!-- end -->` in README.md and docs/

A result has the command's figures by case and side, with commit, date, machine and versions. A run replaces its own result only.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("performance", "large_models", "quantization", "speculation", "exact", "long_sequences")
    ),
)
PACKAGES = ("torch", "transformers", "vllm", "trl")
NAMES = {"vllm": "vLLM", "trl": "TRL", "trl+vllm": "TRL + vLLM"}
"""How tables write a side or package; others as they are."""

GRPO_7B = "grpo_step.py --shape 7b --prompts 16 --samples 8 --prompt-tokens 256 --new-tokens 512 --checkpointing --max-tokens 16384"

Side = dict[str, float]
Figures = dict[str, dict[str, Side]]
"""Case -> side (lockstep, a peer, or a phase) -> figure -> number."""
Result = dict[str, Any]
"""figures, missing (peer -> reason), command, commit, date, machine, load (per core, before it; null: not known), versions."""


def by_case(found: dict[str, Any]) -> Figures:
    """rollout.py: one case per workload and number of requests."""
    figures: Figures = {}
    for row in found["results"]:
        side = "lockstep" if row["engine"] == "embedded" else row["engine"]
        numbers = {"tokens_per_s": row["tokens_per_s"], "start_s": row["startup_s"]}
        numbers |= {"drift": row["drift"]} if row.get("drift") is not None else {}
        figures.setdefault(row["case"], {})[side] = numbers
    return figures


def by_side(found: dict[str, Any]) -> Figures:
    return {"": found["results"]}


def by_name(found: dict[str, Any]) -> Figures:
    """train_step.py: sides in a list."""
    return {"": {row["name"]: {key: row[key] for key in ("tokens_per_s", "ms", "peak_gb")} for row in found["results"]}}


def by_phase(found: dict[str, Any]) -> Figures:
    """hybrid_cycle.py: seconds per phase, and GiB in use at its end in the second and the last cycle."""
    phases = {}
    for phase, seconds in found["seconds"].items():
        used = found["used_gib"].get(phase, [])
        ends = {"second_gib": used[1], "last_gib": used[-1]} if len(used) > 1 else {}
        phases[phase] = {"seconds": statistics.median(seconds[1:] or seconds), **ends}
    return {"": phases | {"weights": {"gb": found["gb"]}}}


def by_run(found: dict[str, Any]) -> Figures:
    """long_sequences.py: one case per run, with the sides that did not fail."""
    return {
        name: {side: figures for side, figures in sides.items() if "failed" not in figures}
        for name, sides in found["results"].items()
    }


def by_history(found: dict[str, Any]) -> Figures:
    """history_drafts.py: one case per number of sequences; a side per share of the history that is right."""
    return {f"x{row['sequences']}": row["histories"] for row in found["results"]}


def by_class(found: dict[str, Any]) -> Figures:
    """train_profile.py: one side per class of kernels, and the whole step."""
    parts = {name: {key: part[key] for key in ("ms", "tflops") if part[key]} for name, part in found["parts"].items()}
    return {"": parts | {"step": {key: found[key] for key in ("ms", "tflops")}}}


def by_controller(found: dict[str, Any]) -> Figures:
    return {"": found}


def by_ranks(found: dict[str, Any]) -> Figures:
    """simulated_cluster.py: one side per number of ranks."""
    return {"": {f"{row['ranks']:.0f}": row for row in found["results"]}}


def alone(found: dict[str, Any]) -> Figures:
    return {"": {"lockstep": found}}


READERS = {
    "rollout.py": by_case,
    "grpo_step.py": by_side,
    "sft_step.py": by_side,
    "train_step.py": by_name,
    "train_profile.py": by_class,
    "long_sequences.py": by_run,
    "history_drafts.py": by_history,
    "hybrid_cycle.py": by_phase,
    "startup.py": by_controller,
    "simulated_cluster.py": by_ranks,
}
"""Script -> how its JSON becomes figures; the others' JSON is one side's."""


@dataclass(frozen=True)
class Run:
    """One command that measures, on a machine with `device`. It writes `summary.json` in `{folder}`.

    command: a script of this folder with its arguments, or `-m lockstep ...`; variables (NAME=value) may come before it.
    """

    name: str
    device: str
    command: str

    def words(self, **places: str) -> tuple[dict[str, str], list[str]]:
        """Environment and arguments of Python, with the places filled in."""
        words = shlex.split(self.command.format(**places))
        first = next(i for i, word in enumerate(words) if "=" not in word)
        script, *arguments = words[first:]
        if script.endswith(".py"):
            folder = Path(__file__).parent
            script, arguments = str(folder / script), ["--json", f"{places['folder']}/summary.json", *arguments]
        return dict(word.split("=", 1) for word in words[:first]), [script, *arguments]

    def read(self, found: dict[str, Any]) -> Figures:
        return next((read for script, read in READERS.items() if script in self.command), alone)(found)


COMMANDS = {
    "cpu": {
        "rollout-cpu": "OMP_WAIT_POLICY=passive rollout.py --shape 135m --requests 32 --prompt-tokens 32 --new-tokens 64"
        " --engines embedded vllm transformers --peer-python {vllm}",
        "grpo-cpu": "grpo_step.py --shape 135m --prompts 4 --samples 4 --prompt-tokens 32 --new-tokens 32 --micro 16 --steps 4"
        " --peer trl --peer-micro 4 --peer-python {trl}",
        "startup": "startup.py",
        "dispatch": "dispatch.py",
        "large-step": "controller.py --rows 16384 --response 32768 --mean-response 4096 --ranks 512",
        "cluster": "simulated_cluster.py",
        "demo": "-m lockstep demo --device cpu --out {folder}",
    },
    "gpu": {
        "rollout-0.5b": "rollout.py --shape 0.5b --workload uniform mixed --peer-python {vllm}",
        "rollout-7b": "rollout.py --shape 7b --peer-python {vllm}",
        "rollout-requests": "rollout.py --shape 0.5b --requests 1 8 64 256 1024 --repeats 1 --peer-python {vllm}",
        "uncompiled": "TRITON_CACHE_DIR={folder}/triton rollout.py --shape 0.5b --requests 1 --repeats 1 --engines embedded",
        "train": "train_step.py",
        "grpo": "grpo_step.py --steps 8 --peer trl+vllm --peer-python {trl}",
        "grpo-1.5b": "grpo_step.py --shape 1.5b --prompts 16 --samples 8 --prompt-tokens 512 --new-tokens 1024"
        " --max-tokens 16384 --peer trl+vllm --peer-micro 16 --peer-python {trl}",
        "grpo-7b": f"{GRPO_7B} --master-dtype bfloat16 --peer trl+vllm --peer-micro 8 --peer-python {{trl}}",
        "grpo-7b-offload": f"{GRPO_7B} --optimizer-offload --peer none",
        "grpo-vllm": "grpo_step.py --steps 8 --peer none actor_rollout_ref.rollout.name=vllm",
        "sft": "sft_step.py --shape 0.5b --peer trl --peer-python {trl}",
        "sft-liger": "sft_step.py --shape 0.5b --peer trl --peer-python {trl}"
        """ --peer-settings '{{"use_liger_kernel": true}}'""",
        "hybrid-0.5b": "hybrid_cycle.py --shape 0.5b",
        "hybrid-7b": "hybrid_cycle.py --shape 7b --cycles 4 --requests 128 actor_rollout_ref.rollout.gpu_memory_utilization=0.4"
        " actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"
        " actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "rollout-hybrid": "rollout.py --shape hybrid-1.5b --peer-python {vllm}",
        "rollout-moe": "rollout.py --shape qwen3-30b-a3b-quarter --peer-python {vllm}",
        "grpo-hybrid": "grpo_step.py --shape hybrid-1.5b --prompts 16 --samples 8 --prompt-tokens 512 --new-tokens 1024"
        " --max-tokens 16384 --peer trl+vllm --peer-micro 8 --peer-python {trl}",
        "grpo-moe": "grpo_step.py --shape qwen3-30b-a3b-quarter --prompts 16 --samples 8 --checkpointing --max-tokens 16384"
        " --master-dtype bfloat16 --peer trl+vllm --peer-micro 8 --peer-python {trl}",
        "grpo-vl": "grpo_step.py --shape qwen2.5-vl-3b --prompts 16 --samples 8 --prompt-tokens 64 --max-tokens 8192"
        " --peer trl+vllm --peer-micro 8 --peer-python {trl}",
        "rollout-fp8": "rollout.py --shape 7b --engines embedded embedded-fp8 embedded-fp8-cache vllm --peer-python {vllm}",
        "drafts": "history_drafts.py --shape 0.5b --sequences 1 4 16 64 256 512 --right 0.8 0.95 1.0 --repeats 2",
        "grpo-alone": "grpo_step.py --steps 8 --peer none",
        "grpo-exact": "grpo_step.py --steps 8 --peer none actor_rollout_ref.rollout.exact=true",
        "grpo-7b-alone": f"{GRPO_7B} --master-dtype bfloat16 --steps 4 --peer none",
        "grpo-7b-exact": f"{GRPO_7B} --master-dtype bfloat16 --steps 4 --peer none actor_rollout_ref.rollout.exact=true",
        "long-1.5b": "long_sequences.py --run 1.5b",
        "long-1.5b-trl": "long_sequences.py --run 1.5b --only-peer --peer trl+vllm"
        " --peer-setting vllm_gpu_memory_utilization=0.4 --peer-python {trl}",
        "long-7b": "long_sequences.py --run 7b-lora",
        "profile-1.5b": "train_profile.py --shape 1.5b --tokens 33024 --length 33024 --checkpointing",
        "profile-7b": "train_profile.py --shape 7b --tokens 16384 --length 512 --checkpointing",
    },
}
RUNS = [Run(name, device, command) for device, commands in COMMANDS.items() for name, command in commands.items()]


class Results:
    """The stored results of all runs, by name; `used` collects those that a table has read."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self.found: dict[str, Result] = {}
        for file in sorted(folder.glob("*.json")):
            self.found |= json.loads(file.read_text())
        self.used: list[str] = []

    def store(self, run: Run, result: Result) -> None:
        self.found[run.name] = result
        file = self.folder / f"{run.device}.json"
        stored = json.loads(file.read_text()) if file.exists() else {}
        file.parent.mkdir(exist_ok=True)
        lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in (stored | {run.name: result}).items()]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def side(self, run: str, side: str, case: str = "") -> Side | None:
        """The figures of one side, None if it was not measured."""
        if run not in self.found:
            return None
        if run not in self.used:
            self.used.append(run)
        return self.found[run]["figures"].get(case, {}).get(side)

    def why_missing(self, run: str, side: str) -> str:
        reason = self.found.get(run, {}).get("missing", {}).get(side)
        return f"{_name(side)} not measured" + (f": {reason}" if reason else "")


def _name(side: str) -> str:
    return NAMES.get(side, side)


def tokens(figures: Side) -> str:
    memory = f", {figures['peak_gb']:.1f} GB" if figures.get("peak_gb") else ""
    return f"{figures['tokens_per_s']:,.0f} tokens/s{memory}"


def drifting(figures: Side) -> str:
    drift = f", log-probs differ by {figures['drift']:.3f}" if "drift" in figures else ""
    return f"{figures['tokens_per_s']:,.0f} tokens/s{drift}"


def step(figures: Side) -> str:
    phases = {"generation": "gen_s", "update": "update_actor_s", "weights and proof": "update_weights_s"}
    parts = [f"{name} {figures[key]:.2f}" for name, key in phases.items() if figures.get(key)]
    memory = f"{figures['peak_gb']:.1f} GB" if figures.get("peak_gb") else ""
    time = f"{figures['step_s']:.3g} s" if figures["step_s"] >= 10 else f"{figures['step_s']:.2f} s"
    return (
        time
        + (f": {', '.join(parts)}" if parts else "")
        + ("; " if parts and memory else ", " if memory else "")
        + memory
    )


def start(figures: Side) -> str:
    return f"{figures['start_s']:.1f} s"


CELLS: dict[str, Callable[[Side], str]] = {"tokens_per_s": tokens, "step_s": step, "start_s": start}
"""Figure that two sides are compared by -> how a side is written."""


@dataclass(frozen=True)
class Row:
    """Lockstep beside a peer ("": none). peer_run: the run that measured it, if it is another; short: the label in the README."""

    label: str
    run: str
    figure: str
    peer: str
    case: str = ""
    short: str = ""
    peer_run: str = ""

    def text(self, results: Results, label: str) -> str:
        cell, peer_run = CELLS[self.figure], self.peer_run or self.run
        ours = results.side(self.run, "lockstep", self.case)
        theirs = results.side(peer_run, self.peer, self.case) if self.peer else None
        peer = results.why_missing(peer_run, self.peer) if self.peer else ""
        peer = f"{_name(self.peer)} {cell(theirs)}" if theirs else peer
        ratio = f"{_faster(ours, theirs, self.figure)}x" if ours and theirs else ""
        return f"| {label} | {cell(ours) if ours else 'not measured'} | {peer} | {ratio} |"


def _faster(ours: Side, theirs: Side, figure: str) -> str:
    ratio = ours[figure] / theirs[figure]
    ratio = ratio if figure.endswith("_per_s") else 1 / ratio
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


TOKENS, STEP, START = CELLS
CPU, SMALL, LARGE = "135m uniform x32", "0.5b uniform x256", "7b uniform x256"
"""Cases of rollout.py."""
# fmt: off
ROWS: dict[str, list[Row]] = {
    "cpu": [
        Row("rollout, 32 requests of 32 + 64 tokens", "rollout-cpu", TOKENS, "vllm", CPU),
        Row("the same", "rollout-cpu", TOKENS, "transformers", CPU),
        Row("GRPO step, 4 prompts x 4 samples, 32 + 32 tokens", "grpo-cpu", STEP, "trl",
            short="GRPO step, SmolLM2-135M, 2 CPU cores"),
    ],
    "gpu": [
        Row("rollout, 0.5B, 256 requests of 256 + 256 tokens", "rollout-0.5b", TOKENS, "vllm", SMALL,
            "generate 256 x (256 + 256) tokens, 0.5B"),
        Row("rollout, 0.5B, 512 requests, answers of 16 to 1024 tokens with stop tokens", "rollout-0.5b", TOKENS, "vllm",
            "0.5b mixed x512"),
        Row("rollout, 7B, 256 requests of 256 + 256 tokens", "rollout-7b", TOKENS, "vllm", LARGE, "the same, 7B"),
        Row("command to first token, 0.5B, warm start", "rollout-0.5b", START, "vllm", SMALL, "command to first token, 0.5B"),
        Row("the same, 7B", "rollout-7b", START, "vllm", LARGE),
        Row("the same, 0.5B, Triton kernels not compiled", "uncompiled", START, "", "0.5b uniform x1"),
        Row("forward + backward + AdamW, 16,384 packed tokens, half of them responses, 0.5B", "train", TOKENS, "transformers",
            short="train on 16,384 packed tokens, 0.5B"),
        Row("GRPO step, 32 prompts x 8 samples, 256 + 256 tokens, 0.5B", "grpo", STEP, "trl+vllm",
            short="GRPO step, 32 prompts x 8, 256 + 256 tokens, 0.5B"),
        Row("command to the end of its first step, cold start", "grpo", START, "trl+vllm"),
        Row("GRPO step, 16 prompts x 8 samples, 512 + 1024 tokens, 1.5B", "grpo-1.5b", STEP, "trl+vllm",
            short="GRPO step, 16 prompts x 8, 512 + 1024 tokens, 1.5B"),
        Row("GRPO step, 16 prompts x 8 samples, 256 + 512 tokens, 7B, bfloat16 masters, gradient checkpointing", "grpo-7b", STEP,
            "trl+vllm", short="GRPO step, 16 prompts x 8, 256 + 512 tokens, 7B with bfloat16 masters"),
        Row("the same with float32 masters and optimizer offload", "grpo-7b-offload", STEP, ""),
    ],
    "sft": [
        Row("TRL with packing (bfd), sdpa", "sft", TOKENS, "trl"),
        Row("the same with `use_liger_kernel`", "sft-liger", TOKENS, "trl",
            short="SFT with packing, 0.5B; TRL with Liger, without flash-attn"),
        Row("command to the end of the first step", "sft", START, "trl"),
    ],
    "requests": [
        Row(f"{count} at once", "rollout-requests", TOKENS, "vllm", f"0.5b uniform x{count}") for count in (1, 8, 64, 256, 1024)
    ],
    "vllm": [
        Row("step, `rollout.name=vllm`", "grpo-vllm", STEP, "trl+vllm", peer_run="grpo"),
        Row("step, embedded engine", "grpo", STEP, "trl+vllm"),
        Row("command to the end of the first step, `rollout.name=vllm`", "grpo-vllm", START, "trl+vllm", peer_run="grpo"),
    ],
    "families": [
        Row("rollout, Gated DeltaNet hybrid, 1.5B, 256 requests of 256 + 256 tokens", "rollout-hybrid", TOKENS, "vllm",
            "hybrid-1.5b uniform x256"),
        Row("rollout, a quarter of Qwen3-30B-A3B's layers, 256 requests of 256 + 256 tokens", "rollout-moe", TOKENS, "vllm",
            "qwen3-30b-a3b-quarter uniform x256"),
        Row("GRPO step, the hybrid, 16 prompts x 8 samples, 512 + 1024 tokens", "grpo-hybrid", STEP, "trl+vllm"),
        Row("GRPO step, the mixture, 16 prompts x 8 samples, 256 + 256 tokens, bfloat16 masters, gradient checkpointing",
            "grpo-moe", STEP, "trl+vllm"),
        Row("GRPO step, Qwen2.5-VL-3B, 16 prompts x 8 samples, one picture of 448 x 448 and 64 + 256 tokens", "grpo-vl", STEP,
            "trl+vllm"),
    ],
    "long": [
        Row("1.5B, all parameters", "long-1.5b", STEP, "trl+vllm", "1.5b", peer_run="long-1.5b-trl"),
        Row("7B, LoRA of rank 32", "long-7b", STEP, "", "7b-lora"),
    ],
}
# fmt: on
"""Table -> its rows."""


def comparison(name: str, results: Results) -> list[str]:
    header = ["| | Lockstep | peer | Lockstep is faster by |", "|---|---|---|---|"]
    return [*header, *(row.text(results, row.label) for row in ROWS[name])]


def fp8_table(results: Results) -> list[str]:
    """rollout.py: each form of the engine and vLLM in the trainer's precision."""
    lines = [
        "| rollout, 7B, 256 requests of 256 + 256 tokens | Lockstep | vLLM in bfloat16 | Lockstep is faster by |",
        "|---|---|---|---|",
    ]
    theirs = results.side("rollout-fp8", "vllm", LARGE)
    peer = f"{theirs[TOKENS]:,.0f} tokens/s" if theirs else "not measured"
    for label, side in (
        ("bfloat16", "lockstep"),
        ("weights", "embedded-fp8"),
        ("weights and KV cache", "embedded-fp8-cache"),
    ):
        ours = results.side("rollout-fp8", side, LARGE)
        ratio = f"{_faster(ours, theirs, TOKENS)}x" if ours and theirs else ""
        lines.append(f"| {label} | {drifting(ours) if ours else 'not measured'} | {peer} | {ratio} |")
    return lines


def exact_table(results: Results) -> list[str]:
    lines = ["| GRPO step | default | exact | takes longer by |", "|---|---|---|---|"]
    for label, default, exact in (("0.5B", "grpo-alone", "grpo-exact"), ("7B", "grpo-7b-alone", "grpo-7b-exact")):
        sides = [results.side(run, "lockstep") for run in (default, exact)]
        cells = [step(side) if side else "not measured" for side in sides]
        ratio = f"{sides[1][STEP] / sides[0][STEP]:.2f}x" if sides[0] and sides[1] else ""
        lines.append(f"| {label} | {' | '.join(cells)} | {ratio} |")
    return lines


def drafts_table(results: Results) -> list[str]:
    shares = {"none": "none", "0.8": "0.8 right", "0.95": "0.95 right", "1": "all right"}
    lines = [f"| sequences, 256 tokens each | {' | '.join(shares.values())} |", "|---|" + "---|" * len(shares)]
    for count in (1, 4, 16, 64, 256, 512):
        found = (results.side("drafts", share, f"x{count}") for share in shares)
        cells = (
            f"{side['speedup']:.2f}x, {side['acceptance']:.2f} accepted" if side else "not measured" for side in found
        )
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return lines


def memory_table(results: Results) -> list[str]:
    """long_sequences.py: peaks in GB."""
    lines = ["| | generation planned | measured | update planned | measured |", "|---|---|---|---|---|"]
    for label, run, case in (
        ("1.5B, all parameters", "long-1.5b", "1.5b"),
        ("7B, LoRA of rank 32", "long-7b", "7b-lora"),
    ):
        found = results.side(run, "lockstep", case)
        cells = (
            _number(found, f"{kind}_gb/{phase}", 1) for phase in ("gen", "update_actor") for kind in ("planned", "peak")
        )
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


CLASSES = (
    "products",
    "attention",
    "log-prob head",
    "norms and element-wise",
    "gradient sums",
    "optimizer",
    "copies",
    "host gaps",
    "step",
)
"""Of kernels, in train_profile.py."""


def profile_table(results: Results) -> list[str]:
    runs = {"1.5B, one row of 33,024 tokens": "profile-1.5b", "7B, 32 rows of 512 tokens": "profile-7b"}
    lines = [f"| | {' | | '.join(runs)} | |", "|---|" + "---|" * (2 * len(runs))]
    for name in CLASSES:
        cells = []
        for run in runs.values():
            found = results.side(run, name)
            cells += [f"{_number(found, 'ms', 1)} ms" if found else "not measured"]
            cells += [f"{found['tflops']:.0f} TFLOP/s" if found and "tflops" in found else ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def readme_table(results: Results) -> list[str]:
    header = ["| | Lockstep | peer | faster by |", "|---|---|---|---|"]
    rows = [row for name in ("gpu", "sft", "cpu") for row in ROWS[name] if row.short]
    return [*header, *(row.text(results, row.short) for row in rows)]


def controller_table(results: Results) -> list[str]:
    lines = ["| | seconds |", "|---|---|"]
    for label, side in (("local", "local"), ("Ray, 2 workers, cluster started by the command", "ray x2")):
        found = results.side("startup", side)
        lines.append(f"| command to the end of the first step, {label} | {_number(found, 'first_step_s', 1)} |")
    found = results.side("dispatch", "lockstep")
    for label, key in (
        ("64 MB to four workers and back", "there_and_back_s"),
        ("the same bytes with plain Ray actors", "plain_s"),
        ("the same bytes with one `ray.put` and `get`", "put_get_s"),
    ):
        lines.append(f"| {label} | {_number(found, key, 3)} |")
    found = results.side("large-step", "lockstep")
    for label, key in (
        ("16,384 rows of up to 33,792 tokens, 4,096 on average: advantages", "advantages_s"),
        ("their metrics", "metrics_s"),
        ("their mini-batches for 512 ranks", "lay_out_s"),
        ("serialisation for the ranks", "send_s"),
    ):
        lines.append(f"| {label} | {_number(found, key, 1)} |")
    if found:
        lines.append(
            f"| memory for all of it | {found['peak_gb']:.1f} GB for {found['real_gb']:.1f} GB of tokens and numbers |"
        )
    return lines


def cluster_table(results: Results) -> list[str]:
    lines = [
        "| ranks | step | controller | share | forming batches | serialisation | calls | sent, received | scoring, one core |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for ranks in (8, 64, 256, 512, 1024):
        if (found := results.side("cluster", str(ranks))) is None:
            lines.append(f"| {ranks:,} | not measured | | | | | | | |")
            continue
        seconds = (f"{found[key]:.1f} s" for key in ("form_s", "serialise_s", "calls_s"))
        share = f"{found['share']:.1%}, {found['share_with_scoring']:.1%} with scoring"
        step = f"{found['step_s']:,.0f} s | {found['controller_s']:.1f} s | {share}"
        moved = f"{found['sent_gb']:.2f}, {found['received_gb']:.2f} GB"
        lines.append(f"| {ranks:,} | {step} | {' | '.join(seconds)} | {moved} | {found['score_s']:.1f} s |")
    return lines


def _number(figures: Side | None, key: str, digits: int) -> str:
    return f"{figures[key]:.{digits}f}" if figures and key in figures else "not measured"


def demo_table(results: Results) -> list[str]:
    found = results.side("demo", "lockstep") or {}
    lines = ["| | before | after | steps | seconds |", "|---|---|---|---|---|"]
    if found:
        accuracies = f"{found['val_before']:.1%} | {found['val_after']:.1%}"
        lines.append(f"| accuracy on held-out sums | {accuracies} | {found['steps']:.0f} | {found['seconds']:.0f} |")
    return lines


PHASES = {
    "generate": "generate",
    "sleep": "sleep (level 2)",
    "train": "train",
    "wake weights": "wake weights",
    "update": "update",
    "checksums": "checksums",
    "wake cache": "wake KV cache",
    "canary": "canary",
}


def cycle_table(results: Results) -> list[str]:
    shapes = {"0.5B": "hybrid-0.5b", "7B": "hybrid-7b"}
    sizes = {shape: _number(results.side(run, "weights"), "gb", 2) for shape, run in shapes.items()}
    header = " | ".join(
        f"{shape} ({size} GB) | GiB used at its end, second and last cycle" for shape, size in sizes.items()
    )
    lines = [f"| phase | {header} |", "|---|---|---|---|---|"]
    for phase, label in PHASES.items():
        cells = []
        for run in shapes.values():
            found = results.side(run, phase)
            used = ", ".join(_number(found, key, 2) for key in ("second_gib", "last_gib"))
            cells += [f"{_number(found, 'seconds', 2)} s", used]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


# fmt: off
LIMITS: list[tuple[str, str, str, str, str, Callable[[Side], float]]] = [
    ("0.5B, 256 x (256 + 256) tokens", "65 TFLOP; 2.2 GB per step", "0.21 s", "rollout-0.5b", SMALL, lambda f: 65536 / f[TOKENS]),
    ("7B, 256 x (256 + 256) tokens", "855 TFLOP; 21 GB per step", "2.7 s", "rollout-7b", LARGE, lambda f: 65536 / f[TOKENS]),
    ("training step, 0.5B, 16,384 tokens", "43 TFLOP", "0.055 s", "train", "", lambda f: f["ms"] / 1e3),
    ("update of the GRPO step, 74,000 tokens", "212 TFLOP", "0.27 s", "grpo", "", lambda f: f["update_actor_s"]),
]
# fmt: on
"""What is computed, its work, the seconds that 790 TFLOP/s and 4.3 TB/s allow, and the run, case and seconds measured."""


def limits_table(results: Results) -> list[str]:
    lines = ["| | compute and memory traffic | lower bound | measured |", "|---|---|---|---|"]
    for label, work, bound, run, case, seconds in LIMITS:
        found = results.side(run, "lockstep", case)
        lines.append(f"| {label} | {work} | {bound} | {f'{seconds(found):.3g} s' if found else 'not measured'} |")
    return lines


Table = Callable[[Results], list[str]]
TABLES: dict[str, Table] = {
    **{name: partial(comparison, name) for name in ROWS},
    "readme": readme_table,
    "controller": controller_table,
    "cluster": cluster_table,
    "demo": demo_table,
    "cycle": cycle_table,
    "fp8": fp8_table,
    "exact": exact_table,
    "drafts": drafts_table,
    "memory": memory_table,
    "profile": profile_table,
    "limits": limits_table,
}


def origins(results: Results, names: Iterable[str]) -> list[str]:
    """One line per commit and machine: when and where the named runs were measured."""
    groups: dict[str, list[str]] = {}
    for name in names:
        result = results.found[name]
        busy = [f"load {result['load']:.1f} per core"] if (result["load"] or 0.0) > 0.5 else []
        versions = [f"{_name(package)} {version}" for package, version in result["versions"].items()]
        origin = ", ".join([result["machine"], result["date"], f"commit {result['commit']}", *busy, *versions])
        groups.setdefault(origin, []).append(name)
    return [f"- {', '.join(members)}: {origin}" for origin, members in groups.items()]


def filled(text: str, results: Results, tables: dict[str, Table] = TABLES) -> str:
    """The page with every marked table written from the results, and below it where its rows were measured."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise ValueError(f"report.py has no table {name}; it has {', '.join(sorted(tables))}")
        results.used = []
        lines = tables[name](results)
        if not results.used:
            lines = ["Not measured yet."]
        elif name != "readme":
            lines += ["", "Measured on:", *origins(results, results.used)]
        return "\n".join([f"<!-- report {name} -->", "", *lines, "", "<!-- end -->"])

    return re.sub(r"<!-- report (\S+) -->.*?<!-- end -->", table, text, flags=re.S)


def write_tables(results: Results, pages: Sequence[Path] = PAGES) -> None:
    for page in pages:
        page.write_text(filled(page.read_text(), results))


class RunError(Exception):
    """A command failed without a result."""


def measure(run: Run, pythons: dict[str, str]) -> Result:
    """Run the command; its result, with what is missing of its peers."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / run.name
        folder.mkdir()
        variables, arguments = run.words(folder=str(folder), **pythons)
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": paths} | variables
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env)
        summary = folder / "summary.json"
        if not summary.exists():
            raise RunError(f"{run.name}: {' '.join(arguments)} wrote no results (exit code {done.returncode})")
        found = json.loads(summary.read_text())
        if run.name == "demo":
            draw_curve(folder)
    versions = {package: version for package in PACKAGES if (version := version_of(package, pythons))}
    missing = {side: output.splitlines()[-1] for side, output in found.get("failures", {}).items()}
    if "{vllm}" in run.command and "vllm" not in versions:
        missing["vllm"] = "not installed"
    return {
        "figures": run.read(found),
        "missing": missing,
        "command": run.command,
        "commit": _output("git", "describe", "--always", "--dirty"),
        "date": datetime.date.today().isoformat(),
        "machine": machine(run.device),
        "load": round(load, 2),
        "versions": versions,
    }


def draw_curve(folder: Path) -> None:
    """The README's picture: the demo's accuracy and reward."""
    title = "lockstep demo: GRPO on sums, a model of 0.13 million parameters"
    picture = str(ROOT / "docs" / "assets" / "demo.svg")
    names = ["--metric", "validation", "reward", "--title", title, "--out", picture]
    subprocess.run([sys.executable, "-m", "lockstep", "plot", str(folder), *names], cwd=ROOT, check=True)


def version_of(package: str, pythons: dict[str, str]) -> str | None:
    """The version of the package, or its CPU build, in the environment that runs it; None if it is not installed there."""
    python = pythons.get(package, sys.executable)
    script = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    return _output(python, "-c", script, package) or _output(python, "-c", script, f"{package}-cpu") or None


def machine(device: str) -> str:
    if device == "gpu":
        return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()[0]
    found = re.search(r"^Model name: *(.+)$", _output("lscpu"), flags=re.M)
    return f"{os.cpu_count()} cores of {found[1] if found else platform.machine()}"


def _output(*command: str) -> str:
    """What the command prints, empty if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [run.name for run in RUNS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="run only these")
    parser.add_argument("--list", action="store_true", help="show all runs and exit")
    parser.add_argument("--tables", action="store_true", help="run nothing, only write the tables")
    parser.add_argument("--vllm-python", default=sys.executable, help="Python interpreter of the environment with vLLM")
    parser.add_argument("--trl-python", default=sys.executable, help="Python interpreter of the environment with TRL")
    args = parser.parse_args(argv)
    results = Results()
    if args.list:
        for run in RUNS:
            result = results.found.get(run.name)
            measured = f"{result['date']} {result['machine']}" if result else "never"
            print(f"{run.name:18} {run.device}  {measured:40}  {run.command}")
        return
    devices = ("cpu", "gpu") if _output("nvidia-smi", "-L") else ("cpu",)
    wanted = [run for run in RUNS if (run.name in args.only if args.only else run.device in devices)]
    failures = []
    for run in [] if args.tables else wanted:
        print(f"{run.name}: {run.command}", flush=True)
        try:
            results.store(run, measure(run, {"vllm": args.vllm_python, "trl": args.trl_python}))
        except RunError as error:
            failures.append(str(error))
    write_tables(results)
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
