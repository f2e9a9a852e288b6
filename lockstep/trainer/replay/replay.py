"""Computes the steps of a run again, in a folder of its own: a run like any other, that ends after the recorded step.

config and checkpoint of the run ─► the same trainer, workers and data ─► metrics, dumps and the recording in `folder`
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.placement import controller_of, need_critic
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import with_values
from lockstep.observability.jsonl import METRICS_FILE, read_metrics
from lockstep.observability.run_folder import REFERENCE_FILE
from lockstep.trainer.replay.source_run import PARTS, Config, StepToReplay
from lockstep.trainer.run.inputs import prepare_run

ROLLOUTS = "rollouts"
VALIDATION = "validation"
"""Folders of a replay for the dumps of `trainer.rollout_data_dir` and `trainer.validation_data_dir`."""


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
    folder.mkdir(parents=True, exist_ok=True)
    config = replayed_config(to_replay, folder, local or {})
    if (to_replay.run / REFERENCE_FILE).is_file():
        shutil.copy(to_replay.run / REFERENCE_FILE, folder / REFERENCE_FILE)
    saves = save_before and to_replay.step - 1 > to_replay.begin
    prepare_run(config)
    with _quiet():
        if _compute(config, to_replay, folder, saves, batch):
            raise KeyboardInterrupt
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
