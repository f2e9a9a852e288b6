"""The dumps of a run: which steps have one, and the groups in it.

run folder ─► the configs of its starts ─► dump folders ─► {step}.jsonl ─► rows ─► groups (one per prompt)

`rollout_table.py` reads the same files a row at a time.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep.config.schema import get_in, resolved_value
from lockstep.observability.run_folder import CONFIG, starts
from lockstep.utils.untrusted_yaml import read_yaml

Row = dict[str, Any]

KEYS = {False: "trainer.rollout_data_dir", True: "trainer.validation_data_dir"}
"""Whether it is about validation -> the key that selects the dump folder."""

MAIN_COLUMNS = {"input", "output", "gts", "score", "step", "uid", "index", "length", "advantage", "finish_reason"}
MAIN_COLUMNS |= {"messages", "data_source", "reward_failed", "non_finite", "images"}
"""Columns of a dump that are shown in their own place."""


class NoDumps(ValueError):
    """A run that wrote none. remedy: what to set."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True)
class DumpFolder:
    """A folder that a start of the run wrote to. first_step: of that start."""

    first_step: int
    path: Path


@dataclass(frozen=True)
class Group:
    """The responses to one prompt. number: its position in the file, from 1. lines: of each row, from 0."""

    number: int
    rows: list[Row]
    lines: list[int]

    def mean(self, column: str) -> float:
        return fmean([number_in(row, column) for row in self.rows])

    def sorted(self, column: str, *, reverse: bool) -> "Group":
        pairs = zip(self.rows, self.lines)
        ordered = sorted(pairs, key=lambda pair: rank(number_in(pair[0], column)), reverse=reverse)
        return Group(self.number, [row for row, _ in ordered], [line for _, line in ordered])


def dump_file(run: Path, step: int | None, validation: bool) -> Path:
    """The dump of a step; None is the last one. run: a run's folder, a dump folder or a dump."""
    if run.is_file():
        return run
    dumps = dumps_of_run(run, validation) if (run / CONFIG).is_file() else dumps_in(run)
    if not dumps:
        raise ValueError(f"{run} is neither a run's folder (with {CONFIG}) nor has it dumps ({{step}}.jsonl)")
    steps = sorted(dumps)
    if step is not None and step not in dumps:
        raise ValueError(f"--step {step}: {run} has no such step; it has {len(steps)}, from {steps[0]} to {steps[-1]}")
    return dumps[steps[-1] if step is None else step]


def dumps_in(folder: Path) -> dict[int, Path]:
    """Step -> dump; empty if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    stems = (name[: -len(".jsonl")] for name in names if name.endswith(".jsonl"))
    return {int(stem): folder / f"{stem}.jsonl" for stem in stems if stem.isdecimal() and len(stem) < 16}


def dumps_of_run(run: Path, validation: bool) -> dict[int, Path]:
    """Step -> dump, of each step in the folder that the run used then."""
    folders, missing = dump_folders(run, validation)
    if dumps := merged((folder, dumps_in(folder.path)) for folder in folders):
        return dumps
    raise no_dumps(run, validation, missing)


def dump_folders(run: Path, validation: bool) -> tuple[list[DumpFolder], str | None]:
    """The dump folders of each start, first to last, and the setting that names one which does not exist here."""
    missing = None
    folders = []
    for start, config in starts(run):
        value, path = _dump_folder(run, config, KEYS[validation])
        if path is not None:
            folders.append(
                DumpFolder(start if validation else start + 1, path)
            )  # a start may validate before it trains
        elif value:
            missing = value
    return folders, missing


def merged(listings: Iterable[tuple[DumpFolder, dict[int, Path]]]) -> dict[int, Path]:
    """Step -> dump: a step belongs to the last start at or before it."""
    dumps: dict[int, Path] = {}
    for folder, listing in listings:
        dumps |= {step: dump for step, dump in listing.items() if step >= folder.first_step}
    return dumps


def no_dumps(run: Path, validation: bool, missing: str | None) -> ValueError:
    """Why a run has none, and what to do."""
    key = KEYS[validation]
    if missing:
        return ValueError(
            f"{run} wrote its dumps to {key}={missing}, which does not exist here; pass that folder instead"
        )
    what = "" if validation else " of training"
    return NoDumps(f"{run} has no dumps{what}", f"set {key}=FOLDER when you start or resume a run to write them")


def _dump_folder(run: Path, config: Path, key: str) -> tuple[str | None, Path | None]:
    """The dump folder that a config names, and where it is. A relative one is relative to where the run was started."""
    try:
        tree = read_yaml(config)
        tree["trainer"]["default_local_dir"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} is not the config of a run ({type(error).__name__})") from None
    local_dir = tree["trainer"]["default_local_dir"]
    if not (value := get_in(tree, key, None)):
        return None, None
    if not isinstance(value, str):
        raise ValueError(f"{config}: {key} is not a path but {type(value).__name__}")
    try:
        value = str(resolved_value(tree, key) or "")
        path = Path(value).expanduser()
    except (ValueError, RuntimeError):  # an environment variable that is not set here, or a user that does not exist
        return value, None
    if not value:
        return None, None
    with suppress(ValueError, RecursionError):
        local_dir = resolved_value(tree, "trainer.default_local_dir")
    started_in = Path(str(run.resolve()).removesuffix(str(local_dir or ".")))  # unless the run was moved
    places = [folder / path for folder in (Path(), started_in, run)]
    return value, next((place for place in places if os.path.isdir(place)), None)


def read_groups(path: Path) -> list[Group]:
    """The groups of a dump in the order of their first response; without uids, rows with the same prompt are a group."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    found: dict[Any, Group] = {}
    for number, line in enumerate(path.read_bytes().rstrip(b"\n").split(b"\n")):
        try:
            row = json.loads(line)
            group = found.setdefault(row.get("uid", row["input"]), Group(len(found) + 1, [], []))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path}, line {number + 1}: not a row of a dump (JSON with input, output and score)"
            ) from None
        group.rows.append(row)
        group.lines.append(number)
    return list(found.values())


def rank(value: float) -> float:
    """For sorting: NaN is the lowest."""
    return float("-inf") if value != value else value


def number_in(row: Row, column: str) -> float:
    """NaN if the column is missing or not a number."""
    value = row.get(column)
    try:
        return float(value) if isinstance(value, (int, float)) else float("nan")
    except OverflowError:
        return float("nan")
