"""The files of a run's folder by name, and its configs, for the programs that write and read it. Formats: docs/run_folder.md.

config.yaml                   the config of the last start that trained
configs/001_step_0.yaml ...   every config that it was trained with, with the step of that start
global_step_N/config.yaml     the config that step N was trained with
metrics.jsonl                 `jsonl.METRICS_FILE`
timeline.jsonl                `timeline.TIMELINE_FILE`
status.json                   what the run is doing now
restarts.jsonl                restarts within one command, and their causes
plan.json                     memory and time that were planned
hangs/<time>_<phase>.txt      what all processes did when the run was stuck
rollout_journal/              what a fully asynchronous run needs to resume
audits/step_N_<audit>/        the batch of a step in which an audit found something
"""

import re
from pathlib import Path

CONFIG = "config.yaml"
STATUS = "status.json"
"""Written by `status_file.py`."""
RESTARTS = "restarts.jsonl"
"""Written by `trainer/run/restarts.py`."""
PLAN = "plan.json"
"""Written by `trainer/run/memory_check.py`."""
HANGS = "hangs"
"""Folder of the reports of `watchdog/`."""
HISTORY = "configs"
JOURNAL = "rollout_journal"
"""Folder of `trainer/ppo/rollout_sources/journal.py`."""
JOURNAL_EVENTS = "journal.jsonl"
AUDITS = "audits"
"""Folder of `trainer/ppo/batch_dump.py`."""
AUDIT_INFO = "info.json"
"""File of each dump in it."""
REFERENCE_FILE = "reference_log_probs.safetensors"
"""Of DPO: log-probs of the starting model, by `trainer/supervised/dpo.py`."""
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
