"""What a run needs before torch is loaded, so that a problem is reported at once: checks, models, tokenizers and data."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.engines import ROLLOUT_ENGINES, TRAIN_ENGINES
from lockstep.config.placement import controller_of, need_reward_model, needed_models
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import SECTIONS, SUPERVISED
from lockstep.config.schema import flat_values
from lockstep.config.sft import SupervisedConfig
from lockstep.data.files import TEXT_MODEL, refuse_media
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.memory_check import check_memory
from lockstep.trainer.run.preflight import check_positions, preflight
from lockstep.utils.dataset_files import Use, local_data_files
from lockstep.utils.determinism import prepare_cublas
from lockstep.utils.generated_data import is_generated
from lockstep.utils.model_path import base_folder, local_model_folder, revision_of
from lockstep.utils.vision import model_type_of, reads_images, why_no_video_processor

logger = logging.getLogger(__name__)

ACTOR_KEYS = ("actor_rollout_ref.model.path", "model.path")
"""Keys of the model that reads the prompts."""


def prepare_run(config: PPOConfig | SupervisedConfig, *, with_preflight: bool = True) -> None:
    """Check what is outside the config, fetch models and data, and plan the memory; RunError with every problem."""
    if any(value is True for key, value in flat_values(config).items() if key.endswith(".full_determinism")):
        prepare_cublas()
    if with_preflight and (problems := preflight(config)):
        raise RunError("\nerror: ".join(problems), exit_code=2)
    try:
        fetch_inputs(config)
        check_memory(config)
    except ValueError as error:
        raise RunError(str(error), exit_code=2) from error


def fetch_inputs(config: PPOConfig | SupervisedConfig) -> None:
    """Bring everything to this machine that is elsewhere, and log where it is; ValueError if it cannot be found or used.

    On Ray, only configs and tokenizers of models: the workers' machines fetch the weights.
    """
    weights = isinstance(config, SupervisedConfig) or controller_of(config) == "local"
    fetched: dict[str, Path] = {}
    sees = False
    no_videos = ""
    for key, path in _models(config):
        folder = local_model_folder(path, key, weights=weights)
        base = base_folder(folder, key, weights=weights)
        if folder != Path(path).expanduser() and fetched.get(path) != folder:
            logger.info("%s=%s is read from %s", key, path, folder)
        fetched[path] = folder
        sees = sees or (key in ACTOR_KEYS and reads_images(base))
        if key in ACTOR_KEYS:
            rollout = config.actor_rollout_ref.rollout.name if isinstance(config, PPOConfig) else None
            no_videos = why_no_videos_in_rows(base, rollout)
        if isinstance(config, PPOConfig) and key == "actor_rollout_ref.model.path":
            check_positions(config, base)
    for key, path in _tokenizers(config):
        if path not in fetched:
            local_model_folder(path, key, weights=False)
    if not config.data.custom_cls.path:
        if isinstance(config, SupervisedConfig):
            train_files, val_files = config.data.train_files, config.data.val_files
        else:
            train_files = [] if config.trainer.val_only else _files(config.data.train_files)
            val_files = _files(config.data.val_files)
        of_use: dict[Use, list[str]] = {"train": train_files, "val": val_files}
        text_only = _engine_of_text(config) if sees else TEXT_MODEL
        for use, files in of_use.items():
            key = f"data.{use}_files"
            refuse_media(local_data_files(files, use, key), key, config.data, text_only=text_only, no_videos=no_videos)


def why_no_videos_in_rows(base: Path, rollout: str | None) -> str:
    """Why rows may have no videos, for a model of images in the folder `base`; empty if they may. rollout: the engine's name."""
    if reason := why_no_video_processor(model_type_of(base)):
        return reason
    if rollout is not None and not ROLLOUT_ENGINES.info(rollout).reads_videos:
        return f"actor_rollout_ref.rollout.name={rollout} takes no videos; set embedded or hf"
    return ""


def _engine_of_text(config: PPOConfig | SupervisedConfig) -> str | None:
    """The role whose training engine reads text alone, and what to do; None if there is none."""
    roles = [SUPERVISED]
    if isinstance(config, PPOConfig):
        roles = [SECTIONS[role] for role in ("actor", *needed_models(config))]
    for role in roles:
        name = role.config(config).strategy
        if not TRAIN_ENGINES.info(name).reads_images:
            return f"{role.strategy}={name} reads text alone; set {role.strategy}=fsdp"
    return None


def _files(entries: Sequence[str]) -> list[str]:
    """Without data that a package makes."""
    return [entry for entry in entries if not is_generated(entry)]


def fetch_on_workers(config: PPOConfig, groups: Iterable[Any]) -> None:
    """Let every machine fetch its models, and check that all, this one included, have the same revisions."""
    revisions = {path: {revision_of(local_model_folder(path, key, weights=False))} for key, path in _models(config)}
    for group in groups:
        for path, revision in group.fetch_model() if hasattr(group, "fetch_model") else ():
            revisions.setdefault(path, set()).add(revision)
    for path, found in revisions.items():
        if len(found) > 1:
            raise ValueError(
                f"the machines have different revisions of {path} in their Hub caches ({', '.join(sorted(found))}); write "
                f"{path.partition('@')[0]}@REVISION in the config"
            )


def tokenizer_of(config: PPOConfig) -> tuple[str, str]:
    """The key and path of the tokenizer of prompts and responses."""
    model = config.actor_rollout_ref.model
    if config.data.tokenizer:
        return "data.tokenizer", config.data.tokenizer
    if model.tokenizer_path:
        return "actor_rollout_ref.model.tokenizer_path", model.tokenizer_path
    return "actor_rollout_ref.model.path", model.path


def tokenizer_arguments(config: PPOConfig) -> dict[str, Any]:
    """The arguments of `hf_tokenizer` for it."""
    model, (key, path) = config.actor_rollout_ref.model, tokenizer_of(config)
    return {
        "path": path,
        "trust_remote_code": model.trust_remote_code or config.data.trust_remote_code,
        "custom_chat_template": model.custom_chat_template,
        "key": key,
    }


def _models(config: PPOConfig | SupervisedConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config, SupervisedConfig):
        yield "model.path", config.model.path
        return
    yield "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    if "critic" in needed_models(config):
        yield "critic.model.path", config.critic.model.path
    if need_reward_model(config):
        yield "reward_model.model.path", config.reward_model.model.path


def _tokenizers(config: PPOConfig | SupervisedConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config, SupervisedConfig):
        if config.model.tokenizer_path:
            yield "model.tokenizer_path", config.model.tokenizer_path
        return
    model = config.reward_model.model
    paths = {
        "data.tokenizer": config.data.tokenizer,
        "actor_rollout_ref.model.tokenizer_path": config.actor_rollout_ref.model.tokenizer_path,
        "critic.model.tokenizer_path": config.critic.model.tokenizer_path
        if "critic" in needed_models(config)
        else None,
        "reward_model.model.tokenizer_path": model.tokenizer_path if need_reward_model(config) else None,
        "reward_model.model.input_tokenizer": model.input_tokenizer if need_reward_model(config) else None,
    }
    yield from ((key, path) for key, path in paths.items() if path)
