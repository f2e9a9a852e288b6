"""Default names of a run, made of its model, data and algorithm: `gsm8k` and `qwen2.5-0.5b-instruct-gsm8k-grpo`.

They depend only on the settings, so the same command has the same folder. They are lower-case and legal as folder names.
"""

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.schema import get_in
from lockstep.utils.hub import parse_name

GENERIC = re.compile(
    r"(train|test|val|valid|validation|dev|eval|data|dataset|rows|main|default|part|split)?([-_.]?\d+(-of-\d+)?)?"
)
"""Names of files and folders that say nothing about their content."""
EARLIER_NAMES = ("lockstep_examples", "gsm8k")
"""Project and experiment of every run that did not set them, before names were derived."""
_MAX_BYTES = 180
_IDENTITY = ("algorithm.adv_estimator", "actor_rollout_ref.model.path", "data.train_files")


def project_name(data: Any) -> str:
    """data: the value of `data.train_files`, one path or a list."""
    paths = [data] if isinstance(data, str) else list(data or [])
    names = list(dict.fromkeys(data_name(str(path)) for path in paths))
    more = [f"{len(names) - 2}-more"] if len(names) > 2 else []
    return _legal("-".join([*names[:2], *more])) or "lockstep"


def experiment_name(model: Any, data: Any, estimator: Any) -> str:
    algorithm = {"gae": "ppo"}.get(str(estimator), str(estimator).rpartition(":")[2])
    parts = [model_name(str(model)) if model else "", project_name(data) if data else "", algorithm]
    return _legal("-".join(part for part in parts if part)) or "run"


def model_name(path: str) -> str:
    """The name in a folder, a hub id (also its snapshot in the cache), a URL or a checkpoint of a run."""
    if cached := re.search(r"models--(.+?)/snapshots/", path):
        path = cached[1].replace("--", "/")
    parts = _parts(path)
    while len(parts) > 1 and parts[-1] in ("huggingface", "lora_adapter", "actor", "critic"):
        parts.pop()
    if len(parts) > 1 and (step := re.fullmatch(r"(?:global_step_|checkpoint-)(\d+)", parts[-1])):
        parts[-2:] = [f"{parts[-2]}-step{step[1]}"]
    return parts[-1] if parts else ""


def data_name(path: str) -> str:
    """The last part of a path that says what the data are: `gsm8k` of `data/gsm8k/train.parquet`."""
    parts = [re.sub(r"\.(parquet|jsonl?|csv|arrow)(\.\w+)?$", "", part) for part in _parts(path)]
    telling = [part for part in parts if not GENERIC.fullmatch(part)]
    return (telling or parts or [""])[-1]


def earlier_default(values: Mapping[str, Any]) -> str | None:
    """A notice if the default folder of earlier versions has checkpoints of this experiment, and the run's own has none.

    values: dotted key to value of the whole config.
    """
    folder = Path(values["trainer.default_local_dir"])
    names = values["trainer.project_name"], values["trainer.experiment_name"]
    if folder != Path("checkpoints", *names) or any(folder.glob("global_step_*")):
        return None
    for project, experiment in product(*zip(EARLIER_NAMES, names)):
        earlier = Path("checkpoints", project, experiment)
        if any(earlier.glob("global_step_*")) and _is_same_experiment(earlier / "config.yaml", values):
            return (
                f"{earlier} has checkpoints of this experiment: it was the default folder of earlier versions. "
                f"This run starts in {folder}; set trainer.default_local_dir={earlier} to continue the earlier one"
            )
    return None


def _is_same_experiment(config_file: Path, values: Mapping[str, Any]) -> bool:
    try:
        saved = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(saved, dict) and all(get_in(saved, key, None) == values[key] for key in _IDENTITY)


def _parts(path: str) -> list[str]:
    """The parts of a path or URL, without scheme, revision (`@main`), query and the parts that are no names."""
    if name := parse_name(path.partition(":")[0]):
        path = name.repo
    path = re.sub(r"^\w+://", "", path)
    path = re.sub(r"[@?#:][^/]*$", "", path) or path
    return [part for part in re.split(r"[/\\]+", path) if part not in ("", ".", "..", "~")]


def _legal(name: str) -> str:
    name = re.sub(r"[^\w.+-]+", "-", name.lower()).encode()[:_MAX_BYTES].decode(errors="ignore")
    return name.strip("-._")
