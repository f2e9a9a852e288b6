"""The figures of docs/performance.md and other pages: run the benchmarks on this machine, keep the results, write the tables.

    python benchmarks/report.py [--only NAME ...]      run those that this machine can run, or only the named ones; write the tables
    python benchmarks/report.py --list                 the names, their commands, and when each was measured
    python benchmarks/report.py --tables               only write the tables from the stored results
    ... --model DIR --data FILE                        the real model and the prompts of the runs that need them
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report_tables import Side, side_name, write_tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "vllm", "trl")
GRPO_7B = "grpo_step.py --shape 7b --prompts 16 --samples 8 --prompt-tokens 256 --new-tokens 512 --checkpointing --max-tokens 16384"

GATED_DELTA_IN_VLLM = "--vllm-setting 'gdn_prefill_backend=\"triton\"'"
"""Its default on Hopper needs flashinfer, which compiles when it runs."""

LEARNING = (
    "--prompts 32 --batch 8 --samples 16 --epochs 3 --new-tokens 1024 --exact"
    " data.max_prompt_length=448 custom_reward_function.path=examples/reward_smollm2.py"
    " actor_rollout_ref.model.enable_gradient_checkpointing=false actor_rollout_ref.actor.optim.lr=2e-5"
    " actor_rollout_ref.actor.fsdp_config.full_determinism=true"
    " actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.clip_ratio_high=0.28"
    " actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768"
    " actor_rollout_ref.rollout.gpu_memory_utilization=0.3 actor_rollout_ref.rollout.max_num_seqs=256"
)
"""Of the learning run with and without drafts: 12 steps of 128 answers to easy word problems."""

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
        numbers |= {name: row[name] for name in ("drift", "acceptance") if row.get(name) is not None}
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


def by_launch(found: dict[str, Any]) -> Figures:
    """rollout_profile.py: a side per phase, without its kernels by name, and the usual rollout."""
    phases = {name: found[name] for name in ("prefill", "decode")}
    kept = {name: {key: value for key, value in phase.items() if key != "kernels"} for name, phase in phases.items()}
    return {"": kept | {"usual": {"seconds": found["usual_s"]}}}


def by_epoch(found: dict[str, Any]) -> Figures:
    """history_learning.py: a side per epoch, the first is "1"."""
    return {"": {str(number): epoch for number, epoch in enumerate(found["epochs"], 1)}}


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
    "rollout_profile.py": by_launch,
    "grpo_step.py": by_side,
    "sft_step.py": by_side,
    "train_step.py": by_name,
    "train_profile.py": by_class,
    "long_sequences.py": by_run,
    "history_drafts.py": by_history,
    "history_learning.py": by_epoch,
    "hybrid_cycle.py": by_phase,
    "startup.py": by_controller,
    "simulated_cluster.py": by_ranks,
}
"""Script -> how its JSON becomes figures; the others' JSON is one side's."""


@dataclass(frozen=True)
class Run:
    """One command that measures, on a machine with `device`. It writes `summary.json` in `{folder}`.

    command: a script of this folder with its arguments, or `-m lockstep ...`; variables (NAME=value) may come before it. Other
             places: `{vllm}` and `{trl}`, Python of a peer; `{model}` and `{data}`, which the caller has to name.
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
        "rollout-hybrid": f"rollout.py --shape hybrid-1.5b --requests 128 --peer-python {{vllm}} {GATED_DELTA_IN_VLLM}",
        "rollout-moe": "rollout.py --shape qwen3-30b-a3b-quarter --requests 128 --peer-python {vllm}",
        "grpo-hybrid": "grpo_step.py --shape hybrid-1.5b --prompts 16 --samples 8 --max-tokens 16384 --peer trl+vllm --peer-micro 8"
        f" --peer-python {{trl}} {GATED_DELTA_IN_VLLM}",
        "grpo-moe": "grpo_step.py --shape qwen3-30b-a3b-quarter --prompts 16 --samples 8 --checkpointing --max-tokens 16384"
        " --master-dtype bfloat16 --peer trl+vllm --peer-micro 8 --peer-python {trl}",
        "grpo-vl": "grpo_step.py --shape qwen2.5-vl-3b --prompts 16 --samples 8 --prompt-tokens 64 --max-tokens 8192"
        " --peer trl+vllm --peer-micro 8 --peer-python {trl}",
        "phases-0.5b": "rollout_profile.py --shape 0.5b --requests 256",
        "phases-hybrid": "rollout_profile.py --shape hybrid-1.5b",
        "phases-moe": "rollout_profile.py --shape qwen3-30b-a3b-quarter",
        "rollout-fp8": "rollout.py --shape 7b --engines embedded embedded-fp8 embedded-fp8-cache",
        "drafts": "history_drafts.py --shape 0.5b --sequences 1 4 16 64 256 512 --right 0.8 0.95 1.0 --repeats 6",
        "drafts-ragged": "rollout.py --shape 3b --workload ragged --engines embedded embedded-drafts --right 0.9",
        "drafts-ragged-vllm": "rollout.py --shape 3b --workload ragged --engines vllm --peer-python {vllm}",
        "drafts-learning": f"history_learning.py --model {{model}} --data {{data}} --out {{folder}}/runs {LEARNING}",
        "drafts-learning-0.7": f"history_learning.py --model {{model}} --data {{data}} --out {{folder}}/runs {LEARNING}"
        " actor_rollout_ref.rollout.temperature=0.7",
        "grpo-alone": "grpo_step.py --steps 8 --peer none",
        "grpo-exact": "grpo_step.py --steps 8 --peer none actor_rollout_ref.rollout.exact=true",
        "grpo-7b-alone": f"{GRPO_7B} --master-dtype bfloat16 --steps 4 --peer none",
        "grpo-7b-exact": f"{GRPO_7B} --master-dtype bfloat16 --steps 4 --peer none actor_rollout_ref.rollout.exact=true",
        "long-1.5b": "long_sequences.py --run 1.5b",
        "long-1.5b-trl": "long_sequences.py --run 1.5b --only-peer --peer trl+vllm"
        " --peer-setting vllm_gpu_memory_utilization=0.4 --peer-python {trl}",
        "long-7b": "long_sequences.py --run 7b-lora --prompts 2",
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
        return f"{side_name(side)} not measured" + (f": {reason}" if reason else "")


class RunError(Exception):
    """A command failed without a result."""


def measure(run: Run, places: dict[str, str]) -> Result:
    """Run the command; its result, with what is missing of its peers. places: in the command, empty if not known."""
    if missing := [name for name, place in places.items() if not place and f"{{{name}}}" in run.command]:
        raise RunError(f"{run.name}: give {' and '.join(f'--{name}' for name in missing)}")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / run.name
        folder.mkdir()
        variables, arguments = run.words(folder=str(folder), **places)
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
    versions = {package: version for package in PACKAGES if (version := version_of(package, places))}
    failed = {side: output.splitlines()[-1] for side, output in found.get("failures", {}).items()}
    if "{vllm}" in run.command and "vllm" not in versions:
        failed["vllm"] = "not installed"
    return {
        "figures": run.read(found),
        "missing": failed,
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
    parser.add_argument("--model", default="", help="folder of SmolLM2-135M-Instruct, for drafts-learning")
    parser.add_argument("--data", default="", help="parquet file of its prompts, from word_problems.py")
    args = parser.parse_args(argv)
    places = {"vllm": args.vllm_python, "trl": args.trl_python, "model": args.model, "data": args.data}
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
            results.store(run, measure(run, places))
        except RunError as error:
            failures.append(str(error))
    write_tables(results)
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
