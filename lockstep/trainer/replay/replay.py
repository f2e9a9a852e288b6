"""Computes the steps of a run again, in a temporary folder: a run like any other, that ends after the recorded step.

config and checkpoint of the run ─► the same trainer, workers and data ─► metrics, dumps and the recording in `folder`
"""

import logging
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.placement import controller_of, need_critic
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import leaves, to_plain, with_values
from lockstep.observability.jsonl import METRICS_FILE, read_metrics
from lockstep.observability.run_folder import REFERENCE_FILE
from lockstep.trainer.replay.source_run import PARTS, Config, StepToReplay, wrong
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.inputs import prepare_run

ROLLOUTS = "rollouts"
VALIDATION = "validation"
"""Folders of a replay for the dumps of `trainer.rollout_data_dir` and `trainer.validation_data_dir`."""
WEIGHTS = "rollout_weights"
"""Folder of a replay in place of `rollout.server.weights_folder`."""


def replay(
    to_replay: StepToReplay,
    folder: Path,
    *,
    local: dict[str, Any] | None = None,
    save_before: bool = False,
    batch: Path | None = None,
) -> dict[str, Any]:
    """Compute the steps after the checkpoint up to `step`, and record that; returns its metrics. RunError if it fails.

    local: keys that differ from the run's config because it is computed in one process. save_before, batch: see `Task`.
    """
    _refuse_code_in(to_replay.run, to_replay.config)
    folder.mkdir(parents=True, exist_ok=True)
    config = replayed_config(to_replay, folder, local or {})
    if (to_replay.run / REFERENCE_FILE).is_file():
        shutil.copy(to_replay.run / REFERENCE_FILE, folder / REFERENCE_FILE)
    saves = save_before and to_replay.step - 1 > to_replay.begin
    prepare_run(config)
    try:
        with _quiet():
            if _compute(config, to_replay, folder, saves, batch):
                raise KeyboardInterrupt
    except RunError as error:  # its files are deleted: name none of them
        cause = str(error).partition("; the run ended early")[0].partition(f" (traceback: {folder}")[0]
        raise RunError(cause, error.exit_code) from error
    return next(row for row in read_metrics(folder / METRICS_FILE) if row["step"] == to_replay.step)


def _compute(config: Config, to_replay: StepToReplay, folder: Path, saves: bool, batch: Path | None) -> int:
    """0, or 130 if the user stopped it."""
    from lockstep.trainer.replay.runners import ReplayRunner, Task, make_replay

    task = Task(to_replay.step, folder, saves, batch, to_replay.data_from, to_replay.journal)
    if not isinstance(config, PPOConfig):
        from lockstep.trainer.supervised.runner import run

        return run(config, partial(make_replay, task=task))
    if controller_of(config) == "local":
        return ReplayRunner(task).run(config)
    from lockstep.trainer.run.ray_runner import run_on_ray

    return run_on_ray(config, partial(ReplayRunner, task))


def replayed_config(to_replay: StepToReplay, folder: Path, local: dict[str, Any]) -> Config:
    """The step's config with what concerns where a run begins, and what it writes where."""
    config, checkpoint = to_replay.config, to_replay.checkpoint
    values: dict[str, Any] = {
        "trainer.default_local_dir": str(folder),
        "trainer.resume_mode": "disable" if checkpoint is None else "resume_path",
        "trainer.resume_from_path": None if checkpoint is None else str(checkpoint),
        "trainer.default_hdfs_dir": None,
        "trainer.logger": [],
        "trainer.dashboard": False,
        "trainer.profile_steps": [],
    }
    if isinstance(config, PPOConfig):
        values |= {"trainer.max_restarts": 0, "trainer.log_val_generations": 0, "trainer.val_before_train": False}
        if config.trainer.rollout_data_dir is not None:
            values["trainer.rollout_data_dir"] = str(folder / ROLLOUTS)
        if config.trainer.validation_data_dir is not None:
            values["trainer.validation_data_dir"] = str(folder / VALIDATION)
        server = config.actor_rollout_ref.rollout.server
        if server.weights_folder is not None:
            values["actor_rollout_ref.rollout.server.weights_folder"] = str(folder / WEIGHTS)
        if server.weights_owner is not None:
            values["actor_rollout_ref.rollout.server.weights_owner"] = str(folder)
        values |= _copied_caches(config, folder)
        sections = ["actor_rollout_ref.actor", *(["critic"] if need_critic(config) else [])]
    else:
        sections = ["trainer"]
    values |= {
        f"{section}.checkpoint.{key}": sorted(PARTS)
        for section in sections
        for key in ("load_contents", "save_contents")
    }
    found: Config = with_values(config, values | local)
    return found


def _copied_caches(config: PPOConfig, folder: Path) -> dict[str, Any]:
    """The keys of the judges' caches, copied so that the run's are only read."""
    path = config.reward_model.judge.cache_path
    values: dict[str, Any] = {} if path is None else {"reward_model.judge.cache_path": _copied(path, folder, "judge")}
    ensemble = {}
    for name, entry in config.reward_model.ensemble.items():
        kwargs = entry.get("kwargs") or {}
        if entry.get("source") == "judge" and kwargs.get("cache_path"):
            kwargs = {**kwargs, "cache_path": _copied(kwargs["cache_path"], folder, f"judge_{name}")}
        ensemble[name] = {**entry, "kwargs": kwargs}
    return values | ({"reward_model.ensemble": ensemble} if ensemble else {})


def _copied(cache: str, folder: Path, name: str) -> str:
    """A copy of a SQLite file, which another process may be writing; empty if there is no such file."""
    source, target = Path(cache).expanduser().resolve(), folder / f"{name}.sqlite"
    if source.is_file() and not target.exists():
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as old,
            closing(sqlite3.connect(target)) as new,
        ):
            old.backup(new)
    return str(target)


def _refuse_code_in(run: Path, config: Config) -> None:
    """A folder that somebody sent must not bring its own code."""
    for key, value in leaves(to_plain(config)):
        for word in _texts(value):
            file = word if word.endswith(".py") else word.rpartition(":")[0]
            if file.endswith(".py") and Path(file).expanduser().resolve().is_relative_to(run):
                raise wrong(
                    f"{key}={word}: a replay runs no code from the run's own folder; move the file elsewhere, and change its "
                    f"path in config.yaml and configs/ of {run}"
                )


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value of a config."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the messages of a start that a replay does not make."""
    names = ("lockstep.trainer.ppo.run_summary", "lockstep.trainer.run.training_run", "lockstep.trainer.ppo.audit")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
