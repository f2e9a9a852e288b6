"""Checks of what is outside the config, before torch or a model is loaded: folders, logins, the user's code, the machine."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config.placement import controller_of, num_workers
from lockstep.config.plugin_settings import LOSS_ARGUMENTS, LOSS_KEY, loss_settings
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import RMConfig
from lockstep.config.sft import SupervisedConfig
from lockstep.observability.trackers import TRACKERS
from lockstep.registry import check_signature, find_registered, load_object
from lockstep.rewards.custom import ARGUMENTS, BATCH_ARGUMENTS
from lockstep.rewards.load import load_compute_score
from lockstep.trainer.run.checkpoint import CheckpointStore, RunLock
from lockstep.trainer.run.remote_store import check_url, find_path, reach
from lockstep.trainer.run.run_config import check_same_experiment, saved_config, store_of
from lockstep.utils.checkpoint_folder import read_manifest
from lockstep.utils.files import ensure_writable
from lockstep.utils.model_path import ADAPTER_CONFIG, is_adapter, locate_model

logger = logging.getLogger(__name__)

MANAGER_ARGUMENTS = ("tokenizer", "num_examine", "compute_score", "reward_fn_key")
DATASET_ARGUMENTS = ("data_files", "tokenizer", "config", "max_samples")
SUPERVISED_DATASET_ARGUMENTS = ("parquet_files", "tokenizer", "config", "max_samples")
SAMPLER_ARGUMENTS = ("data_source", "data_config")
WEIGHT_FILES = ("*.safetensors", "*.bin")


def preflight(config: PPOConfig | SupervisedConfig) -> list[str]:
    """What would stop this run later, one line each; logs warnings about the machine."""
    found = []
    checks: Sequence[Callable[[Any], None]] = CHECKS if isinstance(config, PPOConfig) else SUPERVISED_CHECKS
    for check in checks:
        try:
            check(config)
        except ValueError as error:
            found.append(str(error))
    for warning in _machine(config) if isinstance(config, PPOConfig) else ():
        logger.warning(warning)
    return found


def _trackers(config: PPOConfig | SupervisedConfig) -> None:
    for name in config.trainer.logger:
        if (check := getattr(TRACKERS.get(name), "check", None)) is not None:
            check()


def check_reward_function(config: PPOConfig) -> None:
    """ValueError if the reward manager or function cannot be loaded, or has another signature."""
    name = config.reward_model.reward_manager
    manager = find_registered("reward manager", name)  # by the user, or a built-in one if torch is loaded
    if ":" in name:
        manager = _load("reward_model.reward_manager", name)
        _check_call("reward_model.reward_manager", manager, (*MANAGER_ARGUMENTS, *config.reward_model.reward_kwargs))
    of_name = BATCH_ARGUMENTS if name == "batch" else ARGUMENTS
    arguments = getattr(manager, "score_arguments", of_name)
    load_compute_score(config, arguments)


def _policy_loss(config: PPOConfig) -> None:
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    if ":" in policy_loss.loss_mode:
        function = _load(LOSS_KEY, policy_loss.loss_mode)
        _check_call(LOSS_KEY, function, (*LOSS_ARGUMENTS, *loss_settings(function, policy_loss.loss_kwargs)))


def _dataset(config: PPOConfig | SupervisedConfig) -> None:
    custom, key = config.data.custom_cls, "data.custom_cls.path"
    if custom.path is not None:
        arguments = DATASET_ARGUMENTS if isinstance(config, PPOConfig) else SUPERVISED_DATASET_ARGUMENTS
        _check_call(key, _load(key, custom.path, custom.name), arguments)


def _sampler(config: PPOConfig) -> None:
    sampler, key = config.data.sampler, "data.sampler.class_path"
    if sampler.class_path is not None:
        _check_call(key, _load(key, sampler.class_path, sampler.class_name), SAMPLER_ARGUMENTS)


def _load(key: str, reference: str, name: str | None = None) -> Any:
    try:
        return load_object(reference, name)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{key}={reference}: {error}") from error


def _check_call(key: str, function: Any, arguments: tuple[str, ...]) -> None:
    if not callable(function):
        raise ValueError(f"{key}: {function!r} is not a function or class")
    try:
        check_signature(function, arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _model(config: PPOConfig) -> None:
    """A local folder must have weights of a language model, and what `check_positions` asks for."""
    model = config.actor_rollout_ref.model
    refuse_scalar_model("actor_rollout_ref.model.path", model.path)
    folder = Path(model.path).expanduser()
    if not (folder / "config.json").is_file():
        return
    check_positions(config, folder)
    check_weights("actor_rollout_ref.model.path", model.path)


def _supervised_model(config: SupervisedConfig) -> None:
    if not isinstance(config, RMConfig):
        refuse_scalar_model("model.path", config.model.path)
    if (Path(config.model.path).expanduser() / "config.json").is_file():
        check_weights("model.path", config.model.path)


def refuse_scalar_model(key: str, path: str) -> None:
    """ValueError if a local folder or checkpoint is a critic or reward model by its config."""
    place = locate_model(path, key)
    if not isinstance(place, Path):
        return
    try:
        if is_adapter(place):
            kind = json.loads((place / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("task_type")
            is_scalar = kind == "SEQ_CLS"
        else:
            settings = json.loads((place / "config.json").read_text(encoding="utf-8"))
            kind = ", ".join(settings.get("architectures") or [])
            is_scalar = kind.endswith("ForSequenceClassification")
    except (OSError, ValueError, AttributeError, TypeError):
        return  # reported when the file is read for its settings
    if is_scalar:
        raise ValueError(f"{key}={path} is a critic or reward model ({kind}), not a language model")


def check_weights(key: str, path: str) -> None:
    folder = Path(path).expanduser()
    if not any(list(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ValueError(f"{key}={path}: no weights ({' or '.join(WEIGHT_FILES)}) in the folder")


def check_positions(config: PPOConfig, folder: Path) -> None:
    """ValueError if the model in `folder` lacks positions for the longest sequence, as vLLM requires, or readable settings."""
    model, file = config.actor_rollout_ref.model, folder / "config.json"
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"actor_rollout_ref.model.path={model.path}: config.json cannot be read ({error})") from error
    limit = _max_positions({**settings, **(settings.get("text_config") or {}), **model.override_config})
    longest = config.data.max_prompt_length + config.data.max_response_length
    if limit is not None and longest > limit:
        raise ValueError(
            f"data.max_prompt_length={config.data.max_prompt_length} + data.max_response_length="
            f"{config.data.max_response_length} is {longest} tokens, but the model has {limit} positions "
            f"(max_position_embeddings in {file}): lower one of them, or, if the model can extrapolate, set "
            f"+actor_rollout_ref.model.override_config.max_position_embeddings={longest}"
        )


def _max_positions(settings: dict[str, Any]) -> int | None:
    limit = settings.get("max_position_embeddings")
    if not isinstance(limit, int):
        return None
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    scaled = original * factor if isinstance(original, int) and isinstance(factor, int | float) else 0
    return max(limit, int(scaled))


def _folders(config: PPOConfig | SupervisedConfig) -> None:
    trainer = config.trainer
    for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        if (folder := getattr(trainer, key, None)) is not None:
            _check_writable(Path(folder).expanduser(), f"trainer.{key}")
    root = Path(trainer.default_local_dir).expanduser()
    if not root.is_dir():
        return
    with RunLock(root):
        pass
    newest = CheckpointStore(root).newest()
    if trainer.resume_mode == "auto" and newest is not None:
        check_same_experiment(root, config, saved_config(newest))


def _remote_store(config: PPOConfig | SupervisedConfig) -> None:
    """The store can be used, and its newest checkpoint is of this experiment."""
    trainer, store = config.trainer, store_of(config)
    if store is None:
        return
    local = CheckpointStore(Path(trainer.default_local_dir).expanduser())
    check_url(store.key, store.url)
    reach(store, local)
    if local.newest() is None and not getattr(trainer, "val_only", False):
        store.check_writable()


def _nsys(config: PPOConfig | SupervisedConfig) -> None:
    """nsys must be there, and a process that Ray does not start must run under it."""
    if not config.trainer.profile_steps or config.global_profiler.tool != "nsys":
        return
    if shutil.which("nsys") is None:
        raise ValueError(
            "global_profiler.tool=nsys: there is no nsys on PATH; install Nsight Systems on every machine, or set "
            "global_profiler.tool=torch"
        )
    on_ray = isinstance(config, PPOConfig) and controller_of(config) == "ray"
    if not on_ray and "NSYS_PROFILING_SESSION_ID" not in os.environ:
        raise ValueError(
            "global_profiler.tool=nsys: this process runs the model, so it must run under nsys; put `nsys profile "
            "--trace=cuda,nvtx,cublas --capture-range=cudaProfilerApi --capture-range-end=repeat -o report` before the command, "
            "or set trainer.controller=ray"
        )


def _checkpoint(config: PPOConfig | SupervisedConfig) -> None:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode != "resume_path" or not path:
        return
    if "://" in path:
        check_url("trainer.resume_from_path", path)
        find_path(path)
        return
    try:
        read_manifest(Path(path).expanduser())
    except ValueError as error:
        raise ValueError(
            f"trainer.resume_from_path={path} is not a checkpoint (a global_step_N folder): {error}"
        ) from error


def _check_writable(folder: Path, key: str) -> None:
    """ValueError if the folder cannot be written to; leaves no folder that did not exist."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        ensure_writable(folder, key)
    finally:
        with suppress(OSError):  # not empty: another run has begun there
            for path in created:
                path.rmdir()


def _machine(config: PPOConfig) -> Iterator[str]:
    cores = os.cpu_count() or 1
    counts = {"data.dataloader_num_workers": config.data.dataloader_num_workers}
    counts["reward_model.reward_kwargs.num_workers"] = config.reward_model.reward_kwargs.get("num_workers", 0)
    if controller_of(config) == "ray" and config.trainer.device == "cpu":
        counts["trainer.n_gpus_per_node"] = num_workers(config) // config.trainer.nnodes
    for key, count in counts.items():
        if isinstance(count, int) and count > cores:
            yield f"{key}={count}: this machine has {cores} cores, so more than {cores} processes only slow each other down"


CHECKS: tuple[Callable[[PPOConfig], None], ...] = (
    *(check_reward_function, _policy_loss, _dataset, _sampler),
    *(_model, _checkpoint, _trackers, _nsys, _folders, _remote_store),
)
SUPERVISED_CHECKS: tuple[Callable[[SupervisedConfig], None], ...] = (
    _dataset,
    _supervised_model,
    _checkpoint,
    _trackers,
    _nsys,
    _folders,
    _remote_store,
)
"""Folders and stores come last: the rest leaves no trace."""
