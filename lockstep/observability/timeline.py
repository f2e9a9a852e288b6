"""`lockstep timeline RUN`: what the controller and every worker did during the steps of a run, and when.

`timeline.jsonl` in the run's folder has the spans of each step, in one line or, with what followed the step, in two:
{"step": 3, "begin_us": 1735689590000000, "spans": [[name, role, rank, offset_us, duration_us], ...]}.
The command writes them as one HTML page without references to the network, or as a Chrome trace.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep.observability.jsonl import JsonlFile, read_metrics
from lockstep.utils.files import atomic_write_text
from lockstep.utils.spans import Span, Track

TIMELINE_FILE = "timeline.jsonl"
"""The spans of a run, in its folder."""

LAST_STEPS = 5
"""How many steps are shown by default."""

PAGE = Path(__file__).with_name("timeline.html")
CHART = Path(__file__).parent / "dashboard" / "static" / "timeline_chart.js"
"""The script that draws, shared with the dashboard."""

Steps = dict[int, list[Span]]
"""Step to its spans, by begin; of two that begin together the outer comes first."""


class TimelineFile:
    """Appends the spans of steps to `timeline.jsonl`. start_step: see `JsonlFile`."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        self._file = JsonlFile(run_dir / TIMELINE_FILE, "trainer.default_local_dir", start_step)

    def append(self, step: int, spans: Sequence[Span]) -> None:
        if spans:
            begin = min(span.begin_us for span in spans)
            rows = [[s.name, s.role, s.rank, s.begin_us - begin, s.end_us - s.begin_us] for s in spans]
            line = json.dumps({"step": step, "begin_us": begin, "spans": rows}, separators=(",", ":"))
            self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def read_steps(run: Path) -> Steps:
    """The spans of a run, from its folder or its timeline.jsonl; ValueError if there are none."""
    file = run / TIMELINE_FILE if run.is_dir() else run
    steps: Steps = {}
    for line in read_metrics(file):
        steps.setdefault(line["step"], []).extend(spans_in(line))
    if not steps:
        raise ValueError(f"{run}: no {TIMELINE_FILE} with a complete step; is it the folder of a run?")
    return {step: by_begin(spans) for step, spans in sorted(steps.items())}


def spans_in(line: dict[str, Any]) -> list[Span]:
    begin = line["begin_us"]
    return [
        Span(name, role, rank, begin + offset, begin + offset + duration)
        for name, role, rank, offset, duration in line["spans"]
    ]


def by_begin(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.begin_us, -span.end_us))


def parse_numbers(text: str, name: str) -> list[range]:
    """The ranges of `3`, `3-5` or `1,3-5`. name: what has this value, for the message."""
    ranges = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*(\d{1,15})(?:-(\d{1,15}))?\s*", part)):
            raise ValueError(f"{name} {text}: expected numbers such as 3, 3-5 or 1,3-5")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranges


def tracks_of(steps: Steps) -> list[Track]:
    """The roles and ranks, the controller first and the others in the order of their first span."""
    spans = sorted((span for spans in steps.values() for span in spans), key=lambda span: span.begin_us)
    first = {role: number for number, role in reversed(list(enumerate(span.role for span in spans)))}
    return sorted({(span.role, span.rank) for span in spans}, key=lambda track: (first[track[0]], track[1]))


def chrome_trace(steps: Steps) -> dict[str, Any]:
    """Trace events for chrome://tracing and Perfetto: a process per role, a thread per rank."""
    tracks = tracks_of(steps)
    pids = {role: number for number, role in enumerate(dict.fromkeys(role for role, _ in tracks), start=1)}
    events: list[dict[str, Any]] = []
    for role, pid in pids.items():
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": role}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
    for role, rank in tracks:
        names = {"name": f"rank {rank}"}
        events.append({"name": "thread_name", "ph": "M", "pid": pids[role], "tid": rank, "args": names})
    for step, spans in steps.items():
        for span in spans:
            times = {"ts": span.begin_us, "dur": span.end_us - span.begin_us}
            place = {"pid": pids[span.role], "tid": span.rank}
            events.append({"name": span.name, "cat": span.role, "ph": "X", **times, **place, "args": {"step": step}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def page(title: str, steps: Steps) -> str:
    """The HTML page, with its data as JSON in it."""
    data = {"title": title} | drawing(steps)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no tag can end the script
    script = CHART.read_text(encoding="utf-8")
    return PAGE.read_text(encoding="utf-8").replace("TIMELINE_CHART", script).replace("TIMELINE_DATA", text)


def drawing(steps: Steps) -> dict[str, Any]:
    """The tracks, and the spans as [step, name, number of the track, lane, begin, end], in microseconds since the first begin."""
    begin = min(span.begin_us for spans in steps.values() for span in spans)
    spans: dict[Track, list[tuple[int, Span]]] = {track: [] for track in tracks_of(steps)}
    for step, found in steps.items():
        for span in found:
            spans[span.role, span.rank].append((step, span))
    lanes = {track: _lanes([span for _, span in own]) for track, own in spans.items()}
    return {
        "tracks": [{"role": role, "rank": rank, "lanes": 1 + max(lanes[role, rank])} for role, rank in spans],
        "spans": [
            [step, span.name, number, lane, span.begin_us - begin, span.end_us - begin]
            for number, (track, own) in enumerate(spans.items())
            for (step, span), lane in zip(own, lanes[track])
        ],
    }


def _lanes(spans: Sequence[Span]) -> list[int]:
    """How many spans of a track are open at each span's begin."""
    lanes = []
    ends = list[int]()
    for span in spans:
        while ends and ends[-1] <= span.begin_us:
            ends.pop()
        lanes.append(len(ends))
        ends.append(span.end_us)
    return lanes


def write_chrome_trace(steps: Steps, path: Path) -> None:
    atomic_write_text(path, json.dumps(chrome_trace(steps), separators=(",", ":")) + "\n")


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    out = options.out or (options.run if options.run.is_dir() else options.run.parent) / "timeline.html"
    try:
        if out.suffix not in (".html", ".json"):
            raise ValueError(f"--out {out}: the file must end in .html or .json (a Chrome trace)")
        steps = _chosen(read_steps(options.run), options.steps)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.suffix == ".json":
                write_chrome_trace(steps, out)
            else:
                atomic_write_text(out, page(str(options.run), steps))
        except OSError as error:
            raise ValueError(f"--out {out}: {error.strerror}") from error
    except ValueError as error:
        sys.stderr.write(f"lockstep timeline: {error}\n")
        return 2
    where = "chrome://tracing or https://ui.perfetto.dev" if out.suffix == ".json" else "a browser"
    sys.stdout.write(f"wrote {out}: {_in_words(steps)}; open it in {where}\n")
    return 0


def _chosen(steps: Steps, text: str | None) -> Steps:
    if text is None:
        return dict(list(steps.items())[-LAST_STEPS:])
    asked = parse_numbers(text, "--steps")
    chosen = {step: spans for step, spans in steps.items() if any(step in numbers for numbers in asked)}
    if not chosen:
        raise ValueError(f"--steps {text}: the run has {_in_words(steps)}")
    return chosen


def _in_words(steps: Iterable[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep timeline",
        description="Show what the controller and the workers did during the steps of a run, also of one that is still going.",
        epilog="docs/profiling.md explains the picture.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder or its timeline.jsonl")
    parser.add_argument("--steps", metavar="N", help=f"steps such as 3, 3-5 or 1,3-5; default: the last {LAST_STEPS}")
    parser.add_argument(
        *("-o", "--out"),
        type=Path,
        metavar="FILE",
        help="FILE.html for a browser (default: RUN/timeline.html), or FILE.json, a Chrome trace",
    )
    return parser
