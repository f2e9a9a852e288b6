"""`lockstep compare RUN RUN ...`: the settings that differ between runs, and their results, side by side.

config of the last step ─► keys with different values ─┐
metrics.jsonl ───────────► final, best, mean values ───┴─► tables
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.config.errors import show
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import defaults, leaves
from lockstep.observability.curves import Points, read_runs
from lockstep.observability.run_folder import config_of_step
from lockstep.observability.step_line import format_number, one_line
from lockstep.utils.untrusted import printable
from lockstep.utils.untrusted_yaml import read_yaml

NAMES = (
    "trainer.default_local_dir",
    "trainer.experiment_name",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "global_profiler.save_path",
)
"""Settings that name a run; they always differ."""
SHOWN_MISSING = 20
"""Settings that only some runs have are listed up to this number; more means that the runs are of different programs."""
VALUE_CHARS = 60
PIPE_WIDTH = 200
"""Columns of the output if it is not a terminal."""


class ComparedRun(Protocol):
    """What the results of a run are made from."""

    @property
    def name(self) -> str: ...
    @property
    def last_step(self) -> int: ...
    @property
    def metrics(self) -> set[str]: ...
    def points(self, metric: str) -> Points: ...


def _last(points: Points) -> str:
    return format_number(points[-1][1])


def _best(points: Points, choose: Callable[..., tuple[int, float]] = max) -> str:
    step, value = choose(points, key=lambda point: point[1])
    return f"{format_number(value)} (step {step})"


def _lowest(points: Points) -> str:
    return _best(points, min)


def _median(points: Points) -> str:
    return format_number(median(value for _, value in points))


def _largest(points: Points) -> str:
    return format_number(max(value for _, value in points))


RESULTS: tuple[tuple[str, tuple[str, ...], Callable[[Points], str]], ...] = (
    ("{}, last", ("val-core/*",), _last),
    ("{}, best", ("val-core/*",), _best),
    ("{}, last", ("val/loss", "train/loss"), _last),
    ("{}, best", ("val/loss", "train/loss"), _lowest),
    ("accuracy, last", ("val/accuracy", "val/rewards/accuracies", "train/accuracy", "rewards/accuracies"), _last),
    ("reward, last", ("critic/score/mean", "critic/rewards/mean"), _last),
    ("reward, best", ("critic/score/mean", "critic/rewards/mean"), _best),
    ("response length, last", ("response_length/mean",), _last),
    ("seconds per step", ("timing_s/step", "perf/time_per_step", "train/time(s)"), _median),
    ("tokens per second and GPU", ("perf/throughput",), _median),
    ("GPU memory, GiB", ("perf/max_memory_allocated_gb",), _largest),
)
"""Label ({} is the metric), patterns of metrics, and how its points are shown. The median ignores the slow first steps. A pattern
with * gives a row per metric; of other patterns the first that a run has is used."""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        if len(options.runs) < 2:
            raise ValueError("give two or more runs")
        runs = read_runs(options.runs)
        configs = [read_settings(path, run.last_step) for path, run in zip(dict.fromkeys(options.runs), runs)]
    except ValueError as error:
        sys.stderr.write(f"lockstep compare: {error}\n")
        return 2
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    rows, num_left_out = shown_settings(configs)
    console.print(_table("setting", runs, rows))
    if num_left_out:
        console.print(f" {num_left_out} settings that not all of the runs have are left out")
    console.print()
    console.print(_table("result", runs, list(results(runs))))
    return 0


def read_settings(run: Path, step: int) -> dict[str, Any]:
    """The settings by dotted key that a step of a run was trained with; ValueError if it has no config."""
    return read_config(config_of_step(run if run.is_dir() else run.parent, step))


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a config file by dotted key; ValueError if it cannot be read."""
    try:
        tree = read_yaml(path)
        if not isinstance(tree, dict):
            raise TypeError("it has no settings")
        json.dumps(tree, default=str, skipkeys=True)  # ValueError if a part of it is inside itself
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return dict(leaves(tree))


def shown_settings(configs: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, list[str]]], int]:
    """(key, value in each run) of the settings that differ, and how many are left out because not all of the runs have them."""
    missing = [key for key in all_keys(configs) if not all(key in config for config in configs)]
    left_out = set(missing) if len(missing) > SHOWN_MISSING else set()
    return [(key, values) for key, values in different_settings(configs) if key not in left_out], len(left_out)


def all_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for config in configs for key in config))


def different_settings(configs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """(key, value in each run) of the settings that are not the same in all; those that follow another key are left out."""
    followed = {name: str(value)[2:-1] for name, value in leaves(defaults(PPOConfig)) if str(value).startswith("${")}
    for key in all_keys(configs):
        values = [config.get(key, "-") for config in configs]
        follows = all(config.get(followed.get(key, ""), "-") == value for config, value in zip(configs, values))
        if any(value != values[0] for value in values) and key not in NAMES and not follows:
            yield key, [one_line(show(value), VALUE_CHARS) for value in values]


def results(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, list[str]]]:
    """(what, value in each run); a run that does not have it shows `-`."""
    yield "steps", [str(run.last_step) for run in runs]
    known = sorted(set().union(*(run.metrics for run in runs)))
    for label, patterns, summary in RESULTS:
        groups: list[tuple[str, ...]]
        if "*" in patterns[0]:
            groups = [(name,) for name in known if fnmatchcase(name, patterns[0])]
        else:
            groups = [patterns] if any(name in known for name in patterns) else []
        for names in groups:
            found = [next((points for name in names if (points := run.points(name))), []) for run in runs]
            title = label.format(next(name for name in names if name in known).removeprefix("val-core/"))
            yield title, [summary(points) if points else "-" for points in found]


def _table(what: str, runs: Sequence[ComparedRun], rows: Sequence[tuple[str, list[str]]]) -> Table | Text:
    if not rows:
        return Text(f"no {what} differs")
    table = Table(box=None)
    table.add_column(what, no_wrap=True)
    for run in runs:
        table.add_column(Text(run.name), overflow="fold")
    for name, values in rows:
        table.add_row(Text(printable(name)), *map(Text, values))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep compare",
        description="Show the settings that differ between runs, and their results, side by side.",
        epilog="`lockstep plot RUN RUN` draws their curves.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    return parser
