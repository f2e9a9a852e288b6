"""`lockstep demo`: create a small model, warm it up, train it with RL, report the result.

create (model.py) ─► `lockstep sft` (warmup.py) ─► `lockstep ppo` (main_demo.py) ─► report (report.py)
                         tasks.py: sums of two two-digit numbers (task.py, reward.py), or
                                   products by a calculator (products.py, products_reward.py), or
                                   pictures of shapes (shapes.py, shapes_reward.py, vision_model.py)
"""

import argparse
import time
from pathlib import Path

DESCRIPTION = """\
Train a small language model from scratch with reinforcement learning on this machine: no download, no GPU needed.

A model of 0.13 million parameters first learns sums from examples that mostly forget the carry, so it answers in the
right format but is often wrong. RL then rewards only correct answers. With --task tools it learns to call a calculator
for products that it cannot compute; with --task shapes a vision-language model is trained to count shapes in
pictures."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    started = time.monotonic()
    options = _parser().parse_args(argv)
    # Importing torch takes seconds; `--help` and option errors do not need it.
    from lockstep.demo.main_demo import run_demo

    return run_demo(
        task=options.task,
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
    parser.add_argument(
        "--task",
        choices=("sums", "tools", "shapes"),
        default="sums",
        help="tools: products, by calling a calculator; shapes: how many red squares are in a picture? (sums)",
    )
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="ppo adds a critic and GAE")
    parser.add_argument("--seed", type=_count, default=1, help="seed of the problems, the model and the sampling (1)")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for the run's files (outputs/demo-ALGORITHM-seedSEED)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto uses a GPU if there is one"
    )
    parser.add_argument("--steps", type=_positive, default=None, help="number of training steps")
    parser.add_argument("--warmup-steps", type=_positive, default=None, help="number of supervised warm-up steps")
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
