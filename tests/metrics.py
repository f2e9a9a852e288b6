"""The metrics.jsonl of a run."""

import json
from pathlib import Path
from typing import Any


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers_of(run: Path) -> list[dict[str, Any]]:
    """The metrics without times."""
    return [
        {name: value for name, value in step.items() if name != "time" and not name.startswith(("timing", "perf/"))}
        for step in metrics_of(run)
    ]
