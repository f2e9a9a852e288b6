"""A training run, whatever it trains: its folder with lock, checkpoints and configs, remote copies, trackers, and when it saves.

lock ─► (models are loaded) ─► claim ─► (the trainer loads the checkpoint) ─► open ─► [ log, save ]* ─► close
"""

import logging
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import as_written
from lockstep.config.sft import SupervisedConfig
from lockstep.config.trainer import ResumeMode
from lockstep.observability.dashboard.child import DashboardChild
from lockstep.observability.jsonl import METRICS_FILE, last_step
from lockstep.observability.run_folder import CONFIG
from lockstep.observability.status_file import StatusFile
from lockstep.observability.trackers import Tracking
from lockstep.observability.watchdog.deadlines import Deadlines
from lockstep.observability.watchdog.verdict import Culprit
from lockstep.observability.watchdog.watchdog import Watchdog
from lockstep.trainer.run.checkpoint import CheckpointStore, RunLock
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.failures import explain, how_to_resume
from lockstep.trainer.run.hang_exit import EXIT_CODE, HangExit
from lockstep.trainer.run.memory_check import write_plan
from lockstep.trainer.run.processes import controller_address
from lockstep.trainer.run.remote_copies import RemoteCopies
from lockstep.trainer.run.remote_store import RemoteStore, fetch_path, find_or_fetch, reach
from lockstep.trainer.run.restarts import Restarts
from lockstep.trainer.run.run_config import (
    as_yaml,
    check_same_experiment,
    report_changes,
    saved_config,
    store_of,
    write_run_config,
)
from lockstep.utils.background_call import BackgroundCall
from lockstep.utils.heartbeat import Link, current_link
from lockstep.utils.progress import phase, waiting
from lockstep.utils.state_file import save_state

logger = logging.getLogger(__name__)

LOADER_STATE = "data"
TRAINER_STATE = "trainer_state"
"""Names in a checkpoint, for `utils/state_file.py`."""
STUCK_SAVE_S = 10.0
"""How long a run that was stuck waits for its last checkpoint."""


class TrainingRun(ExitStack):
    """See the module docstring. It closes what it has opened, and what the trainer adds, in the reverse order.

    config:          saved in the folder, and with every checkpoint.
    last_checkpoint: the newest one that this process has loaded or saved.
    tracking:        None until the run is open.
    store:           `trainer.default_hdfs_dir`.
    restarts:        of the command, if it restarts runs; set before `lock`.
    """

    def __init__(self, config: PPOConfig | SupervisedConfig) -> None:
        super().__init__()
        self.config = config
        self.folder = Path(config.trainer.default_local_dir).expanduser()
        self.checkpoints = CheckpointStore(self.folder, keep=checkpoints_to_keep(config))
        self.store = store_of(config)
        self._copies: RemoteCopies | None = None
        self._has_saved = False
        self._saving: BackgroundCall | None = None
        self.commit_s = 0.0
        """Seconds that the last checkpoint took in the background (`trainer.async_save`)."""
        self.last_checkpoint: Path | None = None
        self.tracking: Any = None
        self._is_locked = False
        self._status: StatusFile | None = None
        self._watchdog: Watchdog | None = None
        self._hang_exit: HangExit | None = None
        self.on_forced_end: Callable[[int], None] = lambda exit_code: None
        """Called before the process is ended because the run is stuck and does not react."""
        self.restarts: Restarts | None = None
        self.is_open = False

    @property
    def trains(self) -> bool:
        """False with `trainer.val_only`."""
        return not (isinstance(self.config, PPOConfig) and self.config.trainer.val_only)

    def is_finished(self, num_steps: int) -> bool:
        """Whether the last step is saved and tracked, so that no model needs to be loaded; logs it."""
        is_resumed = self.config.trainer.resume_mode == "auto" and self.trains
        if not is_resumed or not (self.folder / f"global_step_{num_steps}").is_dir():
            return False
        check_same_experiment(self.folder, self.config)
        found = self.checkpoints.find("auto")
        tracked = last_step(self.folder / METRICS_FILE)
        if found is None or tracked is None or min(found[0], tracked) < num_steps:
            return False
        self.log_nothing_to_do(found[0], num_steps)
        if self.store is not None:
            with RunLock(self.folder), self._copying(self.store) as copies:
                copies.submit(found[1])
        return True

    def log_nothing_to_do(self, step: int, num_steps: int) -> None:
        logger.info("nothing to do: the run is already at step %d of %d", step, num_steps)

    def lock(self, num_steps: int | None = None) -> Link | None:
        """Lock the folder, whose `status.json` then says that the run is running; no-op if it is locked.

        num_steps: of the whole run, if known.

        Returns where the other processes of the run report to, if it is watched.
        """
        if self._is_locked:
            return current_link()
        held: ExitStack = self.restarts or self
        if self.restarts is None or not self.restarts.has_lock:
            held.enter_context(RunLock(self.folder))
        self._is_locked = True
        self.callback(setattr, self, "_is_locked", False)
        self.checkpoints.clean_stale()
        self._status = None if self.restarts is None else self.restarts.status
        if self.trains and self._status is None:
            tracked = None if self.config.trainer.resume_mode == "disable" else last_step(self.folder / METRICS_FILE)
            self._status = held.enter_context(StatusFile(self.folder, tracked or 0, num_steps))
            held.push(self._note_failure)
        if self.restarts is not None:
            self.restarts.has_lock = True
            self.restarts.status = self._status
        if self.trains and self.config.trainer.watchdog.enable:
            self._watch()
        return current_link()

    def _watch(self) -> None:
        """Start the watchdog (docs/watchdog.md)."""
        config = self.config.trainer
        ends = config.on_hang != "warn"
        if ends:
            self._hang_exit = self.enter_context(HangExit(config.on_hang == "restart", self._end_by_force))
        deadlines = (self.restarts and self.restarts.deadlines) or Deadlines(config.watchdog)
        if self.restarts is not None:
            self.restarts.deadlines = deadlines
        try:
            host, role = controller_address(self.config)
            on_hang = self._on_hang if ends else None
            watchdog = self.enter_context(Watchdog(config.watchdog, self.folder, host, role, on_hang, deadlines))
        except Exception as error:  # noqa: BLE001 - such as no address to listen at, or no more threads: the run goes on
            logger.warning("the run is not watched (trainer.watchdog): %s: %s", type(error).__name__, error)
            return
        self._watchdog = watchdog
        if self._status is not None:
            self._status.watch = watchdog.status
            self.callback(setattr, self._status, "watch", None)

    def _on_hang(self, verdict: str, culprits: list[Culprit]) -> None:
        """The watchdog has reported that the run is stuck, and it is to end."""
        assert self._hang_exit is not None and self._watchdog is not None
        self._hang_exit.end(verdict)
        for culprit in culprits:
            if not culprit.process.dump.answers:  # it would not end by itself either
                self._watchdog.reporters.kill(culprit.process.state)

    def _end_by_force(self, verdict: str) -> None:
        if self._status is not None:
            self._status.abandon(
                f"{verdict.rstrip('.')}; the run ended early{how_to_resume(self.config, self.last_checkpoint)}"
            )
        self.on_forced_end(EXIT_CODE)

    def claim(self, resume_from: Path | None = None) -> tuple[int, Path] | None:
        """Lock the folder and find the checkpoint to resume from: its step and folder; None to start at step 0.

        resume_from: overrides the config.
        """
        self.lock()
        config = self.config.trainer
        mode, path = ("resume_path", str(resume_from)) if resume_from else (config.resume_mode, config.resume_from_path)
        found = self._find(mode, path)
        saved = None if found is None else saved_config(found[1])
        if saved is not None and config.resume_mode == "auto":
            check_same_experiment(self.folder, self.config, saved)
        if mode == "auto":
            self.checkpoints.mend_tracker(None if found is None else found[0])
        if found is None or saved is None:
            if config.resume_mode == "disable" and list(self.folder.glob("global_step_*")):
                logger.warning("%s has checkpoints of an earlier run, which are kept", self.folder)
            return None
        self.last_checkpoint = found[1]
        logger.info("resuming from %s", found[1])
        if self.trains:
            report_changes(saved, self.config, found[1])
        return found

    def _find(self, mode: ResumeMode, path: str | None) -> tuple[int, Path] | None:
        """`CheckpointStore.find`, also at remote stores, whose checkpoint is then fetched."""
        if self.store is not None and mode == "auto":
            return find_or_fetch(self.store, self.checkpoints)
        if self.store is not None:
            reach(self.store, self.checkpoints)  # checks its experiment; for the sequence of the next save
        if mode == "resume_path" and path is not None and "://" in path:
            is_own = self.store is not None and path.rstrip("/").rpartition("/")[0] == self.store.url
            return fetch_path(path, self.checkpoints, restore=is_own)
        return self.checkpoints.find(mode, path)

    def _copying(self, store: RemoteStore) -> RemoteCopies:
        trainer = self.config.trainer
        return RemoteCopies(store, self.folder, self.checkpoints.keep, trainer.hdfs_wait_s)

    def open(self, step: int, num_steps: int, metrics: dict[str, Any] | None) -> None:
        """Save the config and open the trackers. metrics: those of `step`, logged if the process died before it did so; None if the
        trainer does that."""
        config = self.config.trainer
        if self._status is not None:
            self._status.resume(step, num_steps)
        if self.restarts is not None:
            self.restarts.step = step
        self.write_config(step, num_steps)
        if self.store is not None and self.trains:
            self.callback(self._prune_copied)
            self._copies = copies = self.enter_context(self._copying(self.store))
            self.checkpoints.in_use = lambda: copies.folder_in_use
        self.tracking = Tracking(
            project_name=config.project_name,
            experiment_name=config.experiment_name,
            default_backend=config.logger,
            config=as_written(self.config),
            run_dir=self.folder,
            total_steps=num_steps if self.trains else None,
            start_step=step if self.trains else None,
        )
        self.callback(self._close_trackers)
        if self.trains:
            write_plan(self.config, self.folder)
            if config.dashboard:
                self.enter_context(DashboardChild(self.folder, config.dashboard_port))
        if metrics is not None and (self.tracking.last_step or 0) < step:
            self.tracking.log(data=metrics, step=step)
        resumed = self.last_checkpoint
        if self._copies is not None and resumed is not None and resumed.parent == self.checkpoints.root:
            self._copies.submit(resumed)  # its copy may have been interrupted
        self.is_open = True
        self.callback(setattr, self, "is_open", False)
        if self._hang_exit is not None:
            self.push(self._hang_exit.unwinding)

    def _close_trackers(self) -> None:
        with phase("close the trackers"):
            self.tracking.finish()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Track the metrics of a step."""
        extra: dict[str, Any] = self._copies.metrics() if self._copies is not None else {}
        if self.restarts is not None:
            self.restarts.step = step
            if self.restarts.count:
                extra = extra | {"training/restarts": self.restarts.count}
        with phase("log metrics"):
            self.tracking.log(data=metrics | extra, step=step)
            if self._status is not None:
                self._status.log(metrics, step)

    def _note_failure(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Give `status.json` the line that the user gets."""
        if self._status is None or error is None:
            return
        try:
            line = str(error) if isinstance(error, RunError) else explain(error, self.config)
        except Exception:  # the error of the run is the one to raise
            logger.debug("cannot explain %r", error, exc_info=True)
            return
        if line is not None:
            self._status.ended("failed", line)

    def write_config(self, step: int, num_steps: int) -> None:
        """Save the config of a start at `step`."""
        write_run_config(self.folder, self.config, step, trains=self.trains and step < num_steps)

    def must_test(self, step: int, num_steps: int) -> bool:
        frequency = self.config.trainer.test_freq
        return frequency > 0 and (step == num_steps or step % frequency == 0)

    def must_save(self, step: int, num_steps: int) -> bool:
        frequency = self.config.trainer.save_freq
        return frequency != 0 and (step == num_steps or (frequency > 0 and step % frequency == 0))

    def save(self, step: int, write: Callable[[Path], None], loader: dict[str, Any], trainer: dict[str, Any]) -> None:
        """Write a checkpoint: what `write` puts into its folder, the states of data loader and trainer, and the config.

        trainer: its "metrics" are those of the step, in case the process dies before they are tracked.
        """

        def write_all(folder: Path) -> None:
            write(folder)
            save_state(folder / LOADER_STATE, loader, owner="the data loader")
            save_state(folder / TRAINER_STATE, {"global_steps": step} | trainer, owner="the trainer")
            (folder / CONFIG).write_text(as_yaml(self.config))

        self.finish_saving()
        self.tracking.sync()
        if self.store is not None:
            self.checkpoints.least_sequence = 1 + self.store.newest_sequence
        self.checkpoints.stage(step, write_all)
        if self.config.trainer.async_save:
            if self._saving is None:
                self.callback(self.end_saving)
            self._saving = BackgroundCall(lambda: self._commit(step), name="save")
        else:
            self._commit(step)

    def _commit(self, step: int) -> None:
        began = time.monotonic()
        self.last_checkpoint = self.checkpoints.commit(step)
        self.commit_s = time.monotonic() - began if self.config.trainer.async_save else 0.0
        logger.info("saved %s", self.last_checkpoint)
        if self._copies is not None:
            self._copies.submit(self.last_checkpoint)
            self._has_saved = True

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete (`trainer.async_save`); raises what has failed."""
        self._finish_saving(None)

    def _finish_saving(self, timeout_s: float | None) -> None:
        if self._saving is not None:
            with waiting("file", f"{self.folder}, the checkpoint that is being saved"):
                self._saving.finish(timeout_s)

    def end_saving(self) -> None:
        """At the end of a run that may have failed already. If it was stuck, the disk may be the reason: do not wait for long."""
        is_stuck = self._hang_exit is not None and self._hang_exit.verdict is not None
        try:
            self._finish_saving(STUCK_SAVE_S if is_stuck else None)
        except Exception as error:  # noqa: BLE001 - told, and earlier checkpoints are there
            self._saving = None
            logger.warning("the last checkpoint could not be saved: %s", error)

    def _prune_copied(self) -> None:
        """Remove what `CheckpointStore.prune` has kept because it was being copied."""
        self.checkpoints.in_use = lambda: None
        if self._has_saved and self.last_checkpoint is not None:
            self.checkpoints.prune(self.last_checkpoint)

    def done(self, step: int) -> int:
        """Returns the exit code, as `stopped` does."""
        self.finish_saving()
        if self._status is not None:
            self._status.ended("finished")
        logger.info("done: %d steps; output folder: %s", step, self.folder)
        return 0

    def stopped(self, step: int, by: str) -> int:
        self.finish_saving()
        if self._status is not None:
            self._status.ended("stopped", f"stopped by {by} after step {step}")
        logger.warning("stopped by %s after step %d; run the same command to resume", by, step)
        return 130


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def num_training_steps(config: PPOConfig | SupervisedConfig, steps_per_epoch: int) -> int:
    """Those of all epochs, or `trainer.total_training_steps` if that is less."""
    num_steps, most = steps_per_epoch * config.trainer.total_epochs, config.trainer.total_training_steps
    return num_steps if most is None else min(most, num_steps)


def checkpoints_to_keep(config: PPOConfig | SupervisedConfig) -> int | None:
    """The larger one of PPO's two limits; None keeps all."""
    if isinstance(config, SupervisedConfig):
        return config.trainer.max_ckpt_to_keep
    limits = (config.trainer.max_actor_ckpt_to_keep, config.trainer.max_critic_ckpt_to_keep)
    return None if None in limits else max(n for n in limits if n is not None)
