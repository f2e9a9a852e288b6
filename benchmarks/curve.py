"""Plot the learning curve of a run as SVG, and print its validations as a Markdown table.

    python benchmarks/curve.py --run runs/grpo --title "GRPO on GSM8K" --output docs/assets/grpo.svg

metrics.jsonl ─► validation and training accuracy by step ─► <svg>
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Points = list[tuple[int, float]]

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 56, 44
VALIDATION, TRAINING = "#1f6feb", "#9aa4b2"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def validation_points(steps: list[dict[str, Any]]) -> Points:
    """Accuracy of each validation; the score if the reward function returns no accuracy."""
    names = [name for name in steps[0] if name.startswith("val-core/") and "/mean@" in name]
    if not names:
        raise SystemExit("the run has no validation before its first step; set trainer.val_before_train=true")
    return [(step["step"], step[names[0]]) for step in steps if names[0] in step]


def training_points(steps: list[dict[str, Any]]) -> Points:
    """Accuracy of each step's training samples; the score if there is no accuracy."""
    name = "reward/acc/mean" if any("reward/acc/mean" in step for step in steps) else "critic/score/mean"
    return [(step["step"], step[name]) for step in steps if name in step]


def round_spacing(most: float, least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... times `least` with at most six ticks up to `most`."""
    return next(s for decade in range(9) for s in (least * f * 10**decade for f in (1, 2, 5)) if s * 6 >= most)


def draw(title: str, validation: Points, training: Points) -> str:
    everything = [*validation, *training]
    last = max(step for step, _ in everything) or 1
    peak = max(value for _, value in everything)
    spacing = round_spacing(peak, 0.01)
    top = spacing * max(1, math.ceil(round(peak / spacing, 6)))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    def line(points: Points, colour: str, width: float) -> str:
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def text(at_x: float, at_y: float, words: str, anchor: str = "middle", colour: str = "#333") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    ]
    parts += [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', text(LEFT, 20, title, "start", "#000")]
    parts += [text(LEFT, 40, "● held-out, greedy", "start", VALIDATION)]
    parts += [text(LEFT + 140, 40, "— training samples", "start", TRAINING)]
    for i in range(round(top / spacing) + 1):
        level = y(i * spacing)
        parts.append(f'<path d="M{LEFT} {level:.1f}H{WIDTH - RIGHT}" stroke="#e2e5e9"/>')
        parts.append(text(LEFT - 6, level + 4, f"{i * spacing:.0%}", "end"))
    ticks = range(0, last + 1, int(round_spacing(last, 1)))
    parts += [text(x(step), HEIGHT - BOTTOM + 18, str(step)) for step in ticks]
    parts += [text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 8, "training step")]
    parts += [line(training, TRAINING, 1), line(validation, VALIDATION, 2)]
    parts += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="3" fill="{VALIDATION}"/>' for s, v in validation]
    return "\n".join([*parts, "</svg>", ""])


def table(steps: list[dict[str, Any]], validation: Points) -> str:
    """Validations by step, with minutes since the first one."""
    times = {step["step"]: step["time"] for step in steps}
    began = times[validation[0][0]]
    lines = ["| step | minutes | held-out accuracy |", "|---|---|---|"]
    lines += [f"| {step} | {(times[step] - began) / 60:.1f} | {value:.1%} |" for step, value in validation]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plot the learning curve of a run.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, with metrics.jsonl")
    parser.add_argument("--title", required=True)
    parser.add_argument("--output", type=Path, required=True, help="SVG file to write")
    arguments = parser.parse_args(argv)
    steps = read_metrics(arguments.run)
    validation = validation_points(steps)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(draw(arguments.title, validation, training_points(steps)))
    print(table(steps, validation))


if __name__ == "__main__":
    main()
