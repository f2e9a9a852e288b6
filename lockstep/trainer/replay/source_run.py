"""The run that is replayed: its metrics, configs and checkpoints. It is only read, and may still be training. Imports no torch.

step ─► the config it was trained with ─► the newest checkpoint before it with all parts, or the start of the run
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from lockstep.config.compose import config_from_tree, load_config
from lockstep.config.environment import digests_of
from lockstep.config.errors import ConfigError
from lockstep.config.normalize import canonical_name
from lockstep.config.placement import controller_of
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.schema import defaults, flat_values, get_in, leaves
from lockstep.config.sft import SFTConfig, SupervisedConfig
from lockstep.config.short_names import SHORT_NAMES
from lockstep.observability.jsonl import METRICS_FILE, read_metrics
from lockstep.observability.run_folder import starts
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.run_config import START_KEYS, read_config
from lockstep.utils.checkpoint_folder import checkpoints_by_age
from lockstep.utils.untrusted_yaml import read_yaml

logger = logging.getLogger(__name__)

Config = PPOConfig | SupervisedConfig
PROGRAMS: dict[str, type[PPOConfig] | type[SupervisedConfig]] = {
    "actor_rollout_ref": PPOConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
    "optim": SFTConfig,
}
"""A section that tells the program of a config, most specific first."""
SERVERS = ("rollout.server.urls", "rollout.server.reload_command")
"""Ends of the keys by which a run reaches running inference servers."""
PARTS = {"model", "optimizer", "extra"}
"""What a checkpoint must hold so that the steps after it can be computed again."""
NO_MATTER = (
    *START_KEYS,
    *("trainer.save_freq", "trainer.test_freq", "trainer.logger", "trainer.project_name", "trainer.experiment_name"),
    *(
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
        "trainer.rollout_token",
        "trainer.log_val_generations",
    ),
    *("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    *("trainer.max_restarts", "trainer.watchdog", "trainer.on_hang", "trainer.val_before_train", "trainer.audit"),
)
"""Beginnings of the keys that change no number of a step."""


def wrong(message: str) -> RunError:
    """Wrong input: exit code 2."""
    return RunError(message, exit_code=2)


@dataclass(frozen=True)
class JournalPart:
    """The samples of an asynchronous run that were made after a checkpoint, or after the start, or are in the checkpoint."""

    run: Path
    begin: int
    checkpoint: Path | None


@dataclass(frozen=True)
class StepToReplay:
    """What is needed to compute a step again.

    settings:   the file with the config of the step.
    checkpoint: None starts at step 0. begin: its step.
    data_from:  a checkpoint whose data must be the same, if the run has one.
    journal:    where the samples of the steps are, if they cannot be generated again.
    """

    run: Path
    step: int
    config: Config
    settings: Path
    checkpoint: Path | None
    begin: int
    data_from: Path | None = None
    journal: JournalPart | None = None


class SourceRun:
    """See the module docstring. RunError if the folder is not a run's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        if not self.folder.is_dir():
            raise wrong(f"{folder}: no such folder; give the folder of a run (trainer.default_local_dir)")
        self.folder = self.folder.resolve()
        if not (self.folder / METRICS_FILE).is_file() or not starts(self.folder)[0][1].is_file():
            raise wrong(f"{folder} is not the folder of a training run: it has no {METRICS_FILE} or no config.yaml")
        self._trees: dict[Path, dict[str, Any]] = {}

    def _tree(self, file: Path) -> dict[str, Any]:
        """`_tree` of a config, which is read once."""
        if file not in self._trees:
            self._trees[file] = _tree(file)
        return self._trees[file]

    @cached_property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """Step -> its metrics; of a step that was logged twice, the last ones. A validation before training is step 0."""
        return {row["step"]: row for row in read_metrics(self.folder / METRICS_FILE)}

    def settings_of(self, step: int) -> Path:
        """The file with the config that a step was trained with."""
        begun = [path for start, path in starts(self.folder) if start < step]
        if not begun:
            raise wrong(
                f"step {step} of {self.folder} was trained before the first start that its configs/ records; it begins "
                f"after step {starts(self.folder)[0][0]}"
            )
        return begun[-1]

    def checkpoints(self) -> dict[int, Path]:
        """Step -> checkpoint, without those of an earlier course of the run, which was resumed from before them."""
        found: dict[int, Path] = {}
        for sequence, step, folder in reversed(checkpoints_by_age(self.folder)):
            if sequence >= 0 and step < min(found, default=step + 1):
                found[step] = folder
        return found

    def replayable(self) -> list[int]:
        """The steps in the log that can be computed again."""
        return [step for step in sorted(self.metrics) if step > 0 and not isinstance(self._begin(step), str)]

    def find(self, step: int) -> StepToReplay:
        """What is needed to compute a step."""
        if step not in self.metrics or step < 1:
            steps = sorted(s for s in self.metrics if s > 0)
            has = f"it has {_in_words(steps)}" if steps else "it has no step yet"
            raise wrong(f"--step {step}: {self.folder} has no such training step; {has}")
        begin = self._begin(step)
        if isinstance(begin, str):
            possible = self.replayable()
            can = f"steps that can be replayed: {_in_words(possible)}" if possible else "no step of it can be replayed"
            raise wrong(f"--step {step}: {begin}; {can}")
        settings = self.settings_of(step)
        data_from = next(iter(self.checkpoints().values()), None)
        return StepToReplay(self.folder, step, config_from(settings), settings, begin[1], begin[0], data_from)

    def find_dumped(self, step: int, checkpoint: Path | None) -> StepToReplay:
        """The same for a step whose batch was kept; the log may not have it. checkpoint: the one before it, if there was one."""
        settings = self.settings_of(step)
        if checkpoint is not None and not checkpoint.is_dir():
            raise wrong(
                f"{checkpoint}, from which step {step} was computed, has been removed; without it the step cannot be replayed"
            )
        begin = 0
        if checkpoint is not None:
            name = re.fullmatch(r"global_step_(\d+)", checkpoint.name)
            if name is None or int(name[1]) >= step:
                raise wrong(f"{checkpoint} is not a checkpoint before step {step} (global_step_N); the dump is damaged")
            begin = int(name[1])
        return StepToReplay(self.folder, step, config_from(settings), settings, checkpoint, begin)

    def _begin(self, step: int) -> tuple[int, Path | None] | str:
        """The step and checkpoint to begin from; or why there is none."""
        problem = ""
        for begin, checkpoint in self._begins(step):
            tree = self._tree(self.settings_of(step))
            begun = [begin, *(start for start, _ in starts(self.folder) if begin < start < step)]
            files = {self.settings_of(start + 1) for start in begun}
            changed = sorted({key for file in files for key in _changed(self._tree(file), tree)})
            lacking = set() if checkpoint is None else PARTS - _saved_parts(checkpoint)
            if lacking:
                problem = problem or (
                    f"{checkpoint} has no {' and no '.join(sorted(lacking))} (checkpoint.save_contents), without which "
                    "the steps after it differ"
                )
            elif changed:
                problem = problem or (
                    f"{', '.join(changed[:3])} changed between step {begin} and step {step}, and the checkpoint of the step "
                    "at which they changed is gone"
                )
            else:
                return begin, checkpoint
        return problem or (
            f"there is no checkpoint before it, and the run did not begin at step 0: it was resumed from "
            f"step {starts(self.folder)[0][0]}, whose checkpoint is not here"
        )

    def _begins(self, step: int) -> Iterator[tuple[int, Path | None]]:
        """Where a replay may begin, newest first."""
        for begin, checkpoint in self.checkpoints().items():
            if begin < step:
                yield begin, checkpoint
        first, settings = starts(self.folder)[0]
        if first == 0:
            yield 0, None
        elif first < step and (path := get_in(_tree(settings), "trainer.resume_from_path", None)):
            folder = Path(str(path)).expanduser()
            if folder.is_dir() and folder.name == f"global_step_{first}":
                yield first, folder


def config_from(settings: Path, changes: Sequence[str] = ()) -> Config:
    """The config of a run's file, with overrides. Keys that follow a changed one by default, and did, follow it again."""
    tree = _tree(settings)
    cls = program_of(tree, settings)
    followed = {name: str(value)[2:-1] for name, value in leaves(defaults(cls)) if str(value).startswith("${")}
    short = SHORT_NAMES.get(cls, {})
    changed = {
        canonical_name(cls, short.get(key, key)) for key in (change.partition("=")[0].lstrip("+") for change in changes)
    }
    for name, key in followed.items():
        if key in changed and get_in(tree, name, None) == get_in(tree, key, None):
            _remove(tree, name)
    try:
        config: Config = (
            config_from_tree(cls, tree, run_checks=False) if not changes else _overridden(cls, tree, changes)
        )
    except ConfigError as error:
        raise wrong(str(error)) from error
    recorded = read_config(settings).digests
    other = [key for key, digest in digests_of(config).items() if recorded.get(key, digest) != digest]
    if other:
        logger.warning("environment variables have other values than in the run: those of %s", ", ".join(other))
    return config


def _overridden(cls: Any, tree: Mapping[str, Any], changes: Sequence[str]) -> Config:
    """The config of a tree with overrides in Hydra's grammar."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(tree, sort_keys=False))
        config: Config = load_config(cls, list(changes), config_name=str(file))
        return config


def program_of(tree: Mapping[str, Any], file: Path) -> type[PPOConfig] | type[SupervisedConfig]:
    for section, cls in PROGRAMS.items():
        if section in tree:
            return cls
    raise wrong(f"{file} is not the config of a training run (lockstep ppo, grpo, sft, rm or dpo)")


def with_servers(found: StepToReplay, servers: Sequence[str]) -> StepToReplay:
    """With other inference servers than the run's, to which a replay would send weights. servers: overrides of their keys."""
    values = flat_values(found.config)
    given = {key for key in SERVERS for change in servers if change.partition("=")[0].endswith(key)}
    missing = [key for key in SERVERS if values.get(f"actor_rollout_ref.{key}") and key not in given]
    if missing:
        raise wrong(
            f"{found.run} generates with running servers, which would get the weights of the replay; start others, and give "
            f"--set 'actor_rollout_ref.{SERVERS[0]}=[URL]'"
            + (f" and --set actor_rollout_ref.{SERVERS[1]}=COMMAND" if SERVERS[1] in missing else "")
        )
    return replace(found, config=config_from(found.settings, servers)) if servers else found


def why_timing_matters(config: Config) -> str | None:
    """Why the samples of a step depend on timing, so that they cannot be generated again; None if they do not."""
    if not isinstance(config, PPOConfig):
        return None
    if config.trainer.async_mode in ("colocated", "fully_async"):
        return f"trainer.async_mode={config.trainer.async_mode}"
    if config.actor_rollout_ref.rollout.over_sample_rate > 0:
        return f"actor_rollout_ref.rollout.over_sample_rate={config.actor_rollout_ref.rollout.over_sample_rate}"
    return None


def in_one_process(config: Config) -> dict[str, Any]:
    """The keys that let one process compute what several did; RunError if the config does not allow it."""
    if not isinstance(config, PPOConfig) or controller_of(config) == "local":
        return {}
    if (
        config.resource_pool_spec
        or config.trainer.async_mode is not None
        or config.trainer.placement not in ("colocate", "hybrid")
    ):
        raise wrong(
            "--local: the roles of this run are in separate processes (resource_pool_spec, trainer.placement or "
            "trainer.async_mode); leave --local out to replay it on Ray"
        )
    return {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 1, "trainer.controller": "local"}


def _saved_parts(checkpoint: Path) -> set[str]:
    """The parts that a checkpoint has of every model."""
    tree = _tree(checkpoint / "config.yaml")
    sections = ["trainer"] if "actor_rollout_ref" not in tree else ["actor_rollout_ref.actor"]
    if "actor_rollout_ref" in tree and (checkpoint / "critic").is_dir():
        sections.append("critic")
    held = [set(get_in(tree, f"{section}.checkpoint.save_contents", PARTS)) for section in sections]
    return set.intersection(*held)


def _changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ, without those that change no number."""
    first, second = dict(leaves(one)), dict(leaves(other))
    return [
        key
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key) and not key.startswith(NO_MATTER)
    ]


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(file)
        if not isinstance(tree, dict):
            raise TypeError("it has no settings")
    except (OSError, ValueError, TypeError) as error:
        raise wrong(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return tree


def _remove(tree: dict[str, Any], name: str) -> None:
    section, _, leaf = name.rpartition(".")
    node = get_in(tree, section, {}) if section else tree
    node.pop(leaf, None)


def _in_words(steps: Sequence[int]) -> str:
    """1-5, 7."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
