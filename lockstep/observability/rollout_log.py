"""Dump the generations of a step or a validation to `{step}.jsonl`, one per line."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.observability.jsonl import json_line
from lockstep.utils.files import atomic_writer, make_private_folder

logger = logging.getLogger(__name__)


def dump_generations(
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[float],
    details: Mapping[str, Sequence[Any]],
    reward_extra_infos_dict: Mapping[str, Sequence[Any]],
    dump_path: Path | str,
    step: int,
) -> Path:
    """Write the generations of a step; return the file."""
    folder = Path(dump_path).expanduser()
    make_private_folder(folder)
    path = folder / f"{step}.jsonl"
    write_generations(inputs, outputs, gts, scores, details, reward_extra_infos_dict, path, step)
    return path


def write_generations(
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[float],
    details: Mapping[str, Sequence[Any]],
    reward_extra_infos_dict: Mapping[str, Sequence[Any]],
    path: Path,
    step: int = 0,
) -> None:
    """Write input, output, gts, score, step, details (uid, index, length, ...) and the reward's extras.

    Scores and details are float32 in the batch and are written with its seven digits. Extras that do not have one value per answer
    are skipped with a warning; one with the name of a detail is written as `reward_{name}`.
    """
    columns: dict[str, Sequence[Any]] = {"input": inputs, "output": outputs, "gts": gts, "score": _rounded(scores)}
    columns |= {"step": [step] * len(inputs), **{name: _rounded(values) for name, values in details.items()}}
    for name, values in columns.items():
        if len(values) != len(inputs):
            raise ValueError(f"dump_generations: {len(values)} values of {name} for {len(inputs)} inputs")
    for name, values in reward_extra_infos_dict.items():
        if len(values) != len(inputs):
            logger.warning("rollout log: skipping %s: %d values for %d answers", name, len(values), len(inputs))
        else:
            columns.setdefault(f"reward_{name}" if name in details else name, values)
    with atomic_writer(path) as file:
        for row in zip(*columns.values()):
            file.write(json_line(dict(zip(columns, row))))


def _rounded(values: Sequence[Any]) -> list[Any]:
    return [float(f"{value:.7g}") if isinstance(value, float) else value for value in values]
