"""`make soak`, or `python -m tests.soak --steps 5000`: long runs of the tiny model; fails if something grows that must not.

Prints for each run and process the Theil-Sen slopes of the second half: memory, open handles, threads, step time, disk without
checkpoints, GPU memory; and the share of time that saving takes.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.runs import SETTINGS, make_files, start
from tests.soak.samples import QUANTITIES, STEPS, Sampler

POLL_S = 0.2
NUM_SAMPLES = 100


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    names = [name for name in SETTINGS if name.startswith(options.run)]
    failed = False
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        files = Path(folder) / "files"
        files.mkdir()
        make_files(files)
        for number, name in enumerate(names):
            run_dir = Path(folder) / f"run{number}"
            num_steps = max(1, options.steps // len(names))
            failed |= not soak(name, files, run_dir, num_steps, options.save_freq, options.noise)
    return int(failed)


def soak(name: str, files: Path, run_dir: Path, num_steps: int, save_freq: int, noise: float) -> bool:
    """Whether the run ended well and nothing grew beyond its bound."""
    every = max(1, num_steps // NUM_SAMPLES)
    begin = time.monotonic()
    process = start(name, files, run_dir, num_steps, save_freq)
    sampler = Sampler(process.pid, run_dir)
    try:
        sampled = 0
        while process.poll() is None:
            step = sampler.read_steps()
            if sampled + every <= step < num_steps:  # after the last step it closes everything
                sampler.sample(step)
                sampled = step
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = sampler.read_steps()
    minutes = (time.monotonic() - begin) / 60
    print(f"\n{name}: {len(sampler.step_s)} steps in {minutes:.1f} minutes, a sample every {every} steps\n")
    if process.returncode != 0 or len(sampler.step_s) < num_steps:
        output = Path(f"{run_dir}.txt").read_text(errors="replace")[-3000:]
        print(f"the run ended with code {process.returncode} at step {last or sampled}:\n{output}")
        return False
    exceeding = report(sampler, noise)
    share = sum(sampler.save_s) / (sum(sampler.step_s) + sum(sampler.save_s))
    num_saves = sum(seconds > 0 for seconds in sampler.save_s)
    print(f"\nsaving: {num_saves} checkpoints, {100 * share:.1f} % of the time (trainer.save_freq={save_freq})")
    print(f"FAILED: {', '.join(exceeding)}" if exceeding else "nothing grows beyond its bound")
    return not exceeding


def report(sampler: Sampler, noise: float) -> list[str]:
    """Print the table; returns what exceeds its bound."""
    print(f"| what | of | first | last | slope per {STEPS} steps | bound |")
    print("|---|---|---|---|---|---|")
    exceeding = []
    last_step = max(series.steps[-1] for series in sampler.series.values())
    for series in sampler.series.values():
        quantity = QUANTITIES[series.quantity]
        if series.steps[-1] < last_step or len(series.steps) < 6:
            continue  # a process that has ended: `processes` shows if there are more and more
        slope, _ = series.growth()
        unit = quantity.unit
        shown, bound = f"{slope:+.3g} {unit}", f"{quantity.bound:g} {unit}"
        if quantity.relative:
            shown, bound = f"{100 * slope:+.1f} %", f"{100 * quantity.bound:g} %"
        values = f"{series.values[0]:.4g} {unit} | {series.values[-1]:.4g} {unit}"
        exceeds = series.exceeds(noise)
        mark = " (exceeded)" if exceeds else ""
        print(f"| {series.quantity} | {series.owner} | {values} | {shown} | {bound}{mark} |")
        if exceeds:
            exceeding.append(f"{series.quantity} of {series.owner}")
    return exceeding


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=5000, help="steps of all runs together (5000)")
    parser.add_argument("--save-freq", type=int, default=50, help="trainer.save_freq (50)")
    parser.add_argument("--noise", type=float, default=1.0, help="factor of the growth that counts as noise (1)")
    parser.add_argument("--run", default="", help="only runs with this text in their name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
