"""The demo's report: accuracy before and after, sample answers and a reward curve, from the files of the run.

metrics.jsonl, validation/{step}.jsonl ─► summary.json and the last page on the terminal (samples.png if problems have pictures)
"""

import io
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from lockstep.demo.tasks import DemoTask
from lockstep.utils.files import atomic_write_json
from lockstep.utils.untrusted import printable

REWARD = "critic/score/mean"
BARS = " ▁▂▃▄▅▆▇█"
PLOT_WIDTH, PLOT_HEIGHT = 64, 8
NUM_SAMPLES = 3
SUMMARY = "summary.json"
PICTURES = "samples.png"
PICTURE_WIDTH = 16
"""Characters per line of a picture on the terminal."""
PICTURE_PIXELS = 192
"""Pixels per side of a picture in samples.png."""

Summary = dict[str, float]


def write_summary(folder: Path, started: float, task: DemoTask) -> Summary:
    """`summary.json`: accuracy on the held-out problems before and after, training steps, seconds since `started`."""
    metrics = read_lines(folder / "metrics.jsonl")
    name = f"val-core/{task.data_source}/acc/mean@1"
    accuracy = [line[name] for line in metrics if name in line]
    summary: Summary = {
        "val_before": accuracy[0],
        "val_after": accuracy[-1],
        "steps": metrics[-1]["step"],
        "seconds": round(time.monotonic() - started, 1),
    }
    atomic_write_json(folder / SUMMARY, summary)
    return summary


def show_report(console: Console, folder: Path, summary: Summary, task: DemoTask) -> None:
    steps = int(summary["steps"])
    before = read_lines(folder / "validation" / "0.jsonl")
    after = read_lines(folder / "validation" / f"{steps}.jsonl")
    rewards = [line[REWARD] for line in read_lines(folder / "metrics.jsonl") if REWARD in line]

    console.rule("4  Result", align="left")
    console.print(_comparison(before, after, task))
    pictures = [] if task.pictures is None else task.pictures(folder / "data" / "val.parquet")
    samples = [i for i, row in enumerate(before) if task.is_sample(row)][:NUM_SAMPLES]
    shown = [Image.open(io.BytesIO(pictures[i])) for i in samples] if pictures else []
    drawn = shown if console.color_system else []
    console.print(_samples([before[i] for i in samples], [after[i] for i in samples], drawn, task))
    if shown:
        side_by_side(shown, PICTURE_PIXELS).save(folder / PICTURES)
    console.print(f"Mean reward, steps 1 to {steps}")
    console.print(plot(rewards, PLOT_WIDTH, PLOT_HEIGHT, unicode=console.encoding.startswith("utf")), markup=False)
    console.print(_files(folder, steps, with_pictures=bool(shown)))
    console.print(
        f"Accuracy on problems never trained on: {summary['val_before']:.1%} before, {summary['val_after']:.1%} after "
        f"{steps} steps; {summary['seconds']:.0f} s in total.",
        style="bold",
        soft_wrap=True,
    )
    console.print(
        f"In a browser, with every sample and its tokens: lockstep dashboard {folder}", soft_wrap=True, markup=False
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _comparison(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], task: DemoTask) -> Table:
    """Fractions of the greedy answers to the held-out problems."""
    table = Table(f"{len(before)} problems not seen in training", title="Before and after", title_justify="left")
    table.add_column("warm-up only", justify="right")
    table.add_column("trained", justify="right")
    for name, share in task.outcomes.items():
        table.add_row(name, *(f"{sum(map(share, rows)) / len(rows):.1%}" for rows in (before, after)))
    return table


def _samples(
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
    pictures: Sequence[Image.Image],
    task: DemoTask,
) -> Table:
    """Held-out problems of interest, and the model's answers."""
    table = Table(*(["picture"] if pictures else []), "problem", title=task.samples_title, title_justify="left")
    for column in ("correct answer", "warm-up only", "trained"):
        table.add_column(column)
    for number, (old, new) in enumerate(zip(before, after)):
        drawn = [on_terminal(pictures[number], PICTURE_WIDTH)] if pictures else []
        table.add_row(*drawn, escape(old["input"]), escape(task.right_answer(old)), _mark(old), _mark(new))
    return table


def on_terminal(picture: Image.Image, width: int) -> Text:
    """The picture, two pixels per character: the upper one is the colour of a half block, the lower one its background."""
    small = np.asarray(picture.convert("RGB").resize((width, width), Image.Resampling.BOX)).tolist()
    lines = []
    for row in range(0, width, 2):
        line = Text()
        for column in range(width):
            upper, lower = (Color.from_rgb(*small[row + below][column]) for below in (0, 1))
            line.append("▀", Style(color=upper, bgcolor=lower))
        lines.append(line)
    return Text("\n").join(lines)


def side_by_side(pictures: Sequence[Image.Image], side: int) -> Image.Image:
    """The pictures in a row, enlarged to squares of `side` pixels, with a grey frame."""
    frame = side // 16
    sheet = Image.new("RGB", (len(pictures) * (side + frame) + frame, side + 2 * frame), "grey")
    for number, picture in enumerate(pictures):
        enlarged = picture.convert("RGB").resize((side, side), Image.Resampling.NEAREST)
        sheet.paste(enlarged, (frame + number * (side + frame), frame))
    return sheet


def _mark(row: dict[str, Any]) -> str:
    color = "green" if row["acc"] else "red"
    return f"[{color}]{escape(printable(row['output']))}[/{color}]  {'right' if row['acc'] else 'wrong'}"


def plot(values: Sequence[float], width: int, height: int, *, unicode: bool) -> str:
    """A bar chart of values between 0 and 1, each bar the mean over a range of steps; ASCII without `unicode`."""
    columns = _means(values, width)
    lines = []
    for row in range(height - 1, -1, -1):
        label = {height // 2: "0.5", height - 1: "1.0", 0: "0.0"}.get(row, "")
        cells = (min(max(value * height - row, 0.0), 1.0) for value in columns)
        bars = (BARS[round(cell * 8)] if unicode else "#" if cell >= 0.5 else " " for cell in cells)
        lines.append(f"{label:>4} {'│' if unicode else '|'}{''.join(bars)}".rstrip())
    return "\n".join(lines)


def _means(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means over neighbouring values."""
    num_columns = min(width, len(values))
    bounds = [i * len(values) // num_columns for i in range(num_columns + 1)] if num_columns else [0]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]


def _files(folder: Path, steps: int, *, with_pictures: bool) -> Table:
    table = Table(box=None, title=f"Files in {folder}", title_justify="left", show_header=False)
    for name, meaning in (
        (f"global_step_{steps}/actor/huggingface", "the trained model, for `from_pretrained`"),
        ("warmup", "the run of the supervised warm-up, with the model that RL starts from"),
        ("model", "the model with random weights"),
        ("data", "the problems"),
        ("reward.py", "the reward function"),
        ("metrics.jsonl", "every metric of every step"),
        ("rollouts", "the samples of every step, some with their tokens"),
        ("validation", "every answer of every validation"),
        ("config.yaml", "the configuration"),
        ("train_again.sh", "the training command, with a new output folder"),
        ("summary.json", "the numbers of this report"),
        *([(PICTURES, "the pictures of this report")] if with_pictures else []),
    ):
        table.add_row(name, meaning)
    return table
