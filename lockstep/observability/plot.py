"""`lockstep plot RUN ...`: draw and compare the curves of runs, in the terminal or to a file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lockstep.observability import chart, text_chart
from lockstep.observability.curves import DEFAULT_METRICS, Panel, Run, panels, read_runs, select_metrics
from lockstep.observability.glossary import explain
from lockstep.utils.untrusted import printable


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        runs = read_runs(options.runs)
        if options.list:
            _list(sorted(set().union(*(run.metrics for run in runs))))
            return 0
        if options.smooth < 1:
            raise ValueError(f"--smooth {options.smooth}: must be 1 or more")
        drawn = panels(runs, select_metrics(runs, options.metric), options.smooth)
        _note_missing(runs, drawn)
        if options.out is None:
            _print(drawn)
        else:
            _save(drawn, options.title, options.out)
    except ValueError as error:
        sys.stderr.write(f"lockstep plot: {error}\n")
        return 2
    return 0


def _list(metrics: Sequence[str]) -> None:
    width = max(map(len, metrics))
    for name in metrics:
        sys.stdout.write(printable(f"{name:{width}}  {explain(name) or ''}".rstrip()) + "\n")


def _note_missing(runs: Sequence[Run], drawn: Sequence[Panel]) -> None:
    for run in runs:
        missing = [panel.metric for panel in drawn if not panel.curves[run.name]]
        if missing:
            sys.stderr.write(f"{run.name} has no {', '.join(missing)}\n")


def _print(drawn: Sequence[Panel]) -> None:
    console = Console(highlight=False)
    with console.capture() as capture:
        for line in text_chart.legend(drawn):
            console.print(line, soft_wrap=True)
        for panel in drawn:
            console.print()
            for line in text_chart.lines(panel, console.width):
                console.print(line, soft_wrap=True)
    sys.stdout.write(capture.get())


def _save(drawn: Sequence[Panel], title: str, path: Path) -> None:
    if path.suffix not in chart.FORMATS:
        raise ValueError(f"--out {path}: the file must end in {', '.join(chart.FORMATS)}")
    try:
        chart.save(chart.draw(title, drawn), path)
    except OSError as error:
        raise ValueError(f"--out {path}: {error.strerror}") from error
    sys.stdout.write(f"wrote {path}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep plot",
        description="Draw and compare the curves of runs, also of runs that are still going.",
        epilog="docs/metrics.md says what each metric means.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder or its metrics.jsonl")
    parser.add_argument(
        "--metric",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=f"a metric, a pattern such as 'timing_s/*', or one of {', '.join(DEFAULT_METRICS)}; default: all of these",
    )
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="draw means of N steps")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.svg, FILE.html or FILE.png instead")
    parser.add_argument("--title", default="", help="title of the picture")
    parser.add_argument("--list", action="store_true", help="list the runs' metrics and exit")
    return parser
