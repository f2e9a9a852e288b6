"""`lockstep demo`: make a small model, warm it up, train it by reinforcement learning, show what it learned.

make (model.py) ─► warm up on sloppy homework (warmup.py) ─► the ordinary training command (program.py) ─► report (report.py)
                                      the task: sums of two two-digit numbers (task.py, reward.py)
"""

import argparse
import time
from pathlib import Path

DESCRIPTION = """\
Train a small language model by reinforcement learning, from nothing, on this machine: no download, no GPU needed.

A model of 0.13 million parameters first learns sums from homework in which the carry is mostly forgotten, so it answers
in the wanted form but is often wrong. Training then rewards right answers alone."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    started = time.monotonic()
    options = _parser().parse_args(argv)
    # `--help` and a wrong option are answered before the seconds that importing torch takes.
    from lockstep.demo.program import run_demo

    return run_demo(
        algorithm=options.algorithm,
        seed=options.seed,
        out=options.out,
        device=options.device,
        steps=options.steps,
        warmup_steps=options.warmup_steps,
        started=started,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="ppo adds a critic and GAE")
    parser.add_argument("--seed", type=_count, default=1, help="of the problems, the model and the sampling (1)")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for the run's files (outputs/demo-ALGORITHM-seedSEED)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes a GPU if any")
    parser.add_argument("--steps", type=_positive, default=None, help="training steps, for a shorter or longer run")
    parser.add_argument("--warmup-steps", type=_positive, default=None, help="supervised steps before them")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number
