"""The configs of a run: in its folder, in its checkpoints, and what changed when it is resumed.

The files are listed in `observability/run_folder.py`. Settings that read environment variables are saved as they were written, with
a digest of their values in a comment at the end.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.environment import digests_of
from lockstep.config.model import CheckpointPart
from lockstep.config.placement import need_critic
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import as_written, get_in, resolved_value, to_plain
from lockstep.config.sft import SupervisedConfig
from lockstep.observability.run_folder import CONFIG, HISTORY, starts
from lockstep.trainer.run.remote_store import STORE_KEY, RemoteStore, StoreError
from lockstep.utils.checkpoint_folder import Manifest
from lockstep.utils.files import atomic_write_text

logger = logging.getLogger(__name__)

IDENTITY: dict[type, tuple[str, ...]] = {
    PPOConfig: ("algorithm.adv_estimator", "actor_rollout_ref.model.path", "critic.enable", "data.train_files"),
    SupervisedConfig: ("model.path", "data.train_files"),
}
"""Keys that identify an experiment, by program."""
IDENTITY_OF_POLICY = ("actor_rollout_ref.model.path",)
"""The part of PPO's that matters with `trainer.val_only`."""
START_KEYS = (
    *("trainer.default_local_dir", "trainer.resume_mode", "trainer.resume_from_path"),
    *("trainer.default_hdfs_dir", "trainer.hdfs_wait_s"),
    *("trainer.profile_steps", "global_profiler.", "trainer.dashboard"),
)
"""Keys, or sections, that are about the start of a run, its profiles or its page, not about its training."""
NO_EFFECT = {
    "trainer.seed": "random generators continue from the checkpoint",
    "critic.model.path": "the critic's weights come from the checkpoint",
    "algorithm.kl_ctrl.kl_coef": "the adaptive controller continues from the checkpoint's coefficient",
}
"""Keys that do nothing once the run has begun, and why; kl_coef only with an adaptive controller."""


_DIGEST = re.compile(r"^# digest of ([\w.]+): ([0-9a-f]+)$", re.MULTILINE)


class SavedConfig(dict[str, Any]):
    """digests: key -> digest of the value that environment variables gave it."""

    digests: Mapping[str, str] = {}


def write_run_config(run_dir: Path, config: PPOConfig | SupervisedConfig, step: int, trains: bool = True) -> None:
    """Write the config of a start at `step`, and add it to the history unless it is the last one there.

    trains: false if the start only validates or the run is finished: a folder that has a config keeps it, the one of its training.
    """
    if not trains and (run_dir / CONFIG).exists():
        return
    text = as_yaml(config)
    (run_dir / HISTORY).mkdir(exist_ok=True)
    earlier = [path for _, path in starts(run_dir) if path.parent.name == HISTORY]
    if not earlier or earlier[-1].read_bytes() != text.encode():
        atomic_write_text(run_dir / HISTORY / f"{len(earlier) + 1:03d}_step_{step}.yaml", text)
    atomic_write_text(run_dir / CONFIG, text)


def as_yaml(config: PPOConfig | SupervisedConfig) -> str:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # five times faster; PyYAML may be built without it
    text: str = yaml.dump(as_written(config), Dumper=dumper, sort_keys=False)
    return text + "".join(f"# digest of {key}: {digest}\n" for key, digest in digests_of(config).items())


def saved_config(checkpoint: Path) -> SavedConfig:
    """The config of a checkpoint; empty, with a warning, if it cannot be read."""
    path = checkpoint / CONFIG
    return read_config(path if path.exists() else checkpoint.parent / CONFIG)


def read_config(path: Path) -> SavedConfig:
    """A saved config; empty, with a warning, if it cannot be read."""
    return _parsed(lambda: path.read_bytes(), path)


def _parsed(read: Callable[[], bytes], path: Path | str) -> SavedConfig:
    try:
        text = read().decode()
        content = yaml.safe_load(text)
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
    except StoreError:
        raise
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        logger.warning("%s cannot be read (%s): changed settings are not reported", path, reason)
        return SavedConfig()
    saved = SavedConfig(content)
    saved.digests = dict(_DIGEST.findall(text))
    return saved


def store_of(config: PPOConfig | SupervisedConfig) -> RemoteStore | None:
    """The store of a run. If the run reads or writes checkpoints there, those of another experiment are refused."""
    trainer = config.trainer
    if not trainer.default_hdfs_dir:
        return None
    written, _ = config.from_environment.get(STORE_KEY, (None, None))
    store = RemoteStore(trainer.default_hdfs_dir, name=written)
    if trainer.resume_mode == "auto" or not getattr(trainer, "val_only", False):
        store.check = partial(_check_remote_experiment, store, config)
    return store


def _check_remote_experiment(store: RemoteStore, config: PPOConfig | SupervisedConfig, checkpoint: Manifest) -> None:
    """`check_same_experiment` for a checkpoint at the store; StoreError if its config cannot be read now."""
    name = f"{store.name}/global_step_{checkpoint.step}/{CONFIG}"
    saved = _parsed(lambda: store.read(checkpoint.step, CONFIG), name)
    check_same_experiment(store.name, config, saved, key=store.key)


def check_same_experiment(
    run_dir: Path | str,
    config: PPOConfig | SupervisedConfig,
    saved: dict[str, Any] | None = None,
    key: str = "trainer.default_local_dir",
) -> None:
    """ValueError if the folder's checkpoints belong to another experiment than `config`.

    saved: the config of the checkpoint to resume from; None reads the run's. key: the one that names the folder.
    """
    if saved is None:
        path = Path(run_dir) / CONFIG
        saved = read_config(path) if path.exists() else SavedConfig()
    now = as_written(config)
    changed = [
        f"{key} was {get_in(saved, key, None)} and is {get_in(now, key, None)}"
        for key in _identity(config)
        if saved and get_in(saved, key, None) != get_in(now, key, None) and not _has_same_value(key, saved, config)
    ]
    changed += [
        f"{key}={get_in(now, key, None)} has another value than before"
        for key in _other_values(saved, config)
        if key in _identity(config)
    ]
    if changed:
        section = "model" if isinstance(config, SupervisedConfig) else "actor_rollout_ref.model"
        rank = f"{section}.lora_rank"
        goes_on = get_in(saved, rank, 0) and get_in(now, rank, 0)  # with its adapter; otherwise that would be merged
        restart = "" if key == STORE_KEY else "or trainer.resume_mode=disable to start from scratch; "
        raise ValueError(
            f"{key}={run_dir} has checkpoints of another experiment: {'; '.join(changed)}. "
            f"Set another {key}; {restart}or, to start from its weights, another {key} and "
            f"{section}.{'lora_adapter_path' if goes_on else 'path'} set to one of its checkpoints (global_step_N)"
        )


def report_changes(saved: dict[str, Any], config: PPOConfig | SupervisedConfig, checkpoint: Path) -> None:
    """Log each setting that differs from the checkpoint's, old and new, and each part of the state that was not saved."""
    for key, old, new in _differences(saved, as_written(config)) if saved else ():
        if _has_same_value(key, saved, config):
            continue
        note = NO_EFFECT.get(key, "")
        if (
            isinstance(config, PPOConfig)
            and key == "algorithm.kl_ctrl.kl_coef"
            and config.algorithm.kl_ctrl.type == "fixed"
        ):
            note = ""
        if "${" in str(new) and "${" not in str(old):
            old = "another value"  # perhaps the secret itself, which an earlier version has saved
        if not key.startswith(START_KEYS):
            logger.warning("changed since the checkpoint: %s was %s, is now %s%s", key, old, new, note and f" ({note})")
    for key in _other_values(saved, config):
        logger.warning("changed since the checkpoint: the value of %s=%s", key, config.from_environment[key][0])
    for section, wanted in _loaded_parts(config).items():
        held = get_in(saved, f"{section}.checkpoint.save_contents", wanted)
        for part, effect in EFFECTS.items():
            if part in wanted and part not in held:
                logger.warning(
                    "%s has no %s of the %s, which was saved with %s.checkpoint.save_contents=[%s]: %s",
                    checkpoint,
                    part,
                    section.rpartition(".")[2],
                    section,
                    ",".join(held),
                    effect,
                )


def _identity(config: PPOConfig | SupervisedConfig) -> tuple[str, ...]:
    if isinstance(config, PPOConfig) and config.trainer.val_only:
        return IDENTITY_OF_POLICY
    return next(keys for cls, keys in IDENTITY.items() if isinstance(config, cls))


def _loaded_parts(config: PPOConfig | SupervisedConfig) -> dict[str, list[CheckpointPart]]:
    """Section with a `checkpoint` -> parts of the state that a resumed run loads."""
    if isinstance(config, SupervisedConfig):
        return {"trainer": config.trainer.checkpoint.load_contents}
    sections = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor.checkpoint.load_contents}
    if need_critic(config):
        sections["critic"] = config.critic.checkpoint.load_contents
    return sections


EFFECTS = {
    "optimizer": "AdamW starts with empty moments, so the run continues with other numbers",
    "extra": "the learning-rate schedule and the random generators start over",
}
"""What happens if a part of the state was not saved."""


def _differences(saved: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new) of the values that differ; a key that one side lacks is `unset` there."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*now, *saved]):
            dotted = f"{name}.{key}" if name else str(key)
            yield from _differences(saved.get(key, "unset"), now.get(key, "unset"), dotted)
    elif saved != now:
        yield name, saved, now


def _other_values(saved: Mapping[str, Any], config: PPOConfig | SupervisedConfig) -> list[str]:
    """Settings that are written as before, but whose environment variables have other values."""
    digests, now = getattr(saved, "digests", {}), as_written(config)
    return [
        key
        for key, digest in digests_of(config).items()
        if digests.get(key, digest) != digest and get_in(saved, key, None) == get_in(now, key, None)
    ]


def _has_same_value(key: str, saved: dict[str, Any], config: PPOConfig | SupervisedConfig) -> bool:
    """Whether a setting that is written in another way, such as by an environment variable, is the same as before."""
    try:
        old = resolved_value(saved, key)
    except ValueError:
        return False
    now = get_in(to_plain(config), key, None)
    return bool(old == now) and now is not None


def warn_if_epochs_end_first(config: PPOConfig | SupervisedConfig, num_steps: int) -> None:
    """num_steps: of the run."""
    asked = config.trainer.total_training_steps
    if asked is not None and asked > num_steps:
        logger.warning(
            "trainer.total_training_steps=%d, but trainer.total_epochs=%d gives only %d steps; raise trainer.total_epochs",
            asked,
            config.trainer.total_epochs,
            num_steps,
        )


def warn_if_on_cpu(config: PPOConfig | SupervisedConfig, device_type: str, num_processes: int) -> None:
    """If nobody has asked for that."""
    if device_type == "cpu" and config.trainer.device == "auto":
        logger.warning(
            "no GPU is visible: training on CPU, in %d process%s (trainer.device=cpu hides this warning)",
            num_processes,
            "" if num_processes == 1 else "es",
        )
