"""Time from the command to the first training step: PPO on the demo's model, in one process and on Ray.

    python benchmarks/startup.py [--workers 2 --repeats 3 --json out.json]

    models_s      the models are loaded and the first rollout starts
    first_step_s  the first step is done and its line printed
    whole_s       the command has exited: three steps, a checkpoint, shutdown

Seconds since the command, medians over the repeats; local and Ray alternate.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo_run import make_files
from rich.console import Console
from rich.table import Table

MODELS_LOADED = "output folder:"
FIRST_STEP = "step 1/"
SETTINGS = ["algorithm.adv_estimator=gae", "trainer.total_training_steps=3"]


def measure(overrides: list[str], folder: Path) -> dict[str, float]:
    """Seconds from the start of one command to the marker lines on its console."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "lockstep.trainer.main_ppo", *overrides, f"trainer.default_local_dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    spent: dict[str, float] = {}
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            for name, marker in (("models_s", MODELS_LOADED), ("first_step_s", FIRST_STEP)):
                if marker in line and name not in spent:
                    spent[name] = time.perf_counter() - started
    if process.returncode:
        raise SystemExit("".join(lines))
    return {**spent, "whole_s": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="worker processes on Ray")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    sides = {"local": [], f"ray x{args.workers}": [f"trainer.n_gpus_per_node={args.workers}"]}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = [*make_files(folder), *SETTINGS]
        for repeat in range(args.repeats):
            for i, (side, more) in enumerate(sides.items()):
                times[side].append(measure([*overrides, *more], folder / f"run-{repeat}-{i}"))
    result = {
        side: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for side, rows in times.items()
    }
    table = Table("controller", *next(iter(result.values())), title="seconds from the command")
    for side, row in result.items():
        table.add_row(side, *(f"{value:.1f}" for value in row.values()))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
