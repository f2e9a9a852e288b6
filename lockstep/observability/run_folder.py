"""The configs in a run's folder, for the programs that write and read it, and the name of its journal.

config.yaml                   the config of the last start that trained
configs/001_step_0.yaml ...   every config that it was trained with, with the step of that start
global_step_N/config.yaml     the config that step N was trained with
"""

import re
from pathlib import Path

CONFIG = "config.yaml"
HISTORY = "configs"
JOURNAL = "rollout_journal"
"""Folder of `trainer/ppo/rollout_sources/journal.py`."""
JOURNAL_EVENTS = "journal.jsonl"
_START = re.compile(r"\d+_step_(\d+)\.yaml")


def starts(run: Path) -> list[tuple[int, Path]]:
    """(step, config) of each start, first to last; `config.yaml` alone if there is no history."""
    found = [
        (int(match[1]), path) for path in sorted((run / HISTORY).glob("*")) if (match := _START.fullmatch(path.name))
    ]
    return found or [(0, run / CONFIG)]


def config_of_step(run: Path, step: int) -> Path:
    """The config that a step was trained with: the one of its checkpoint, else of the last start before it."""
    own = run / f"global_step_{step}" / CONFIG
    if own.is_file():
        return own
    return next((path for start, path in reversed(starts(run)) if start < step), run / CONFIG)
