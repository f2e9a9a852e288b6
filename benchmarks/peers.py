"""Lockstep and its peers, one after the other on this machine: each run in its own process, in turn, for several rounds."""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

Figures = dict[str, float]

TRL_START = """
import json, sys, time
start = time.time()
options = json.loads(sys.argv[1])
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

cuda = torch.cuda.is_available()
ends = []

class Clock(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        self.begin = time.time()

    def on_step_end(self, *args, **kwargs):
        if cuda:
            torch.cuda.synchronize()
        ends.append(time.time())
"""
"""First lines of a script for `run_script` that trains with TRL: its options, and a callback that notes when steps end."""


def settings_of(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE with a value in JSON -> an argument of the peer."""
    return {key: json.loads(value) for key, _, value in (setting.partition("=") for setting in given)}


class PeerError(Exception):
    """A peer's run failed; the message is the end of its output."""


def run_command(command: Sequence[str], run: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Metrics of each step of a Lockstep run in the folder `run`. args: its steps and overrides."""
    settings = [
        f"trainer.total_training_steps={args.steps}",
        "trainer.total_epochs=1000",
        "trainer.save_freq=0",
        f"trainer.default_local_dir={run}",
        *args.overrides,
    ]
    done = subprocess.run(
        [*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the Lockstep run failed:\n{done.stdout[-4000:]}")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_script(python: str, script: str, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the script, which gets `options` as JSON, prints after RESULT. python: the interpreter."""
    file = folder / "peer.py"
    file.write_text(script)
    done = subprocess.run(
        [python, str(file), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise PeerError(done.stdout[-4000:].strip() or f"exit code {done.returncode}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def in_turn(
    rounds: int,
    peers: Sequence[str] | None,
    folder: Path,
    ours: Callable[[Path], Figures],
    peer: Callable[[str, Path], Figures],
    show: Callable[[int, Figures], None],
) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Results of all rounds by side, and the output of peers that failed.

    peers: None is TRL if it is installed, "none" no peer. ours, peer: run one side in a new folder; show: is given the round and
    our figures.
    """
    names = peers if peers is not None else ["trl"] if importlib.util.find_spec("trl") else []
    names = [name for name in names if name != "none"]
    found: dict[str, list[Figures]] = {name: [] for name in ("lockstep", *names)}
    failures: dict[str, str] = {}
    for number in range(rounds):
        own = folder / f"round{number}"
        own.mkdir()
        found["lockstep"].append(ours(own))
        show(number, found["lockstep"][-1])
        for name in names:
            if name in failures:
                continue
            try:
                found[name].append(peer(name, own))
            except (PeerError, OSError, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
                failures[name] = str(error) or repr(error)
    return found, failures


def medians(rounds: dict[str, list[Figures]]) -> dict[str, Figures]:
    return {
        name: {key: statistics.median(figures[key] for figures in runs) for key in runs[0]}
        for name, runs in rounds.items()
        if runs
    }


def finish(
    args: argparse.Namespace,
    console: Console,
    results: dict[str, Figures],
    rounds: dict[str, list[Figures]],
    failures: dict[str, str],
) -> None:
    """Write `--json`; exit code 1 if a peer failed."""
    if args.json:
        content = {"arguments": vars(args), "results": results, "rounds": rounds, "failures": failures}
        args.json.write_text(json.dumps(content, indent=1, default=str))
    for peer, output in failures.items():
        console.print(f"{peer} failed: {output.splitlines()[-1]}", markup=False, soft_wrap=True)
    if failures:
        raise SystemExit(1)
