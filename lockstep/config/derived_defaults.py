"""Values that depend on what the user set: defaults that would be wrong then, and clip ratios written as bounds."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.actor_rollout_ref import own_quantization
from lockstep.config.batch_sizes import BATCH, MINI, mini_batch_size
from lockstep.config.errors import ConfigError
from lockstep.config.estimators import needs_groups
from lockstep.config.generation import GenerationConfig
from lockstep.config.micro_batches import filled_by_tokens
from lockstep.config.policy_loss import BUILT_IN_LOSSES, LossNeeds
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.run_names import experiment_name, project_name
from lockstep.config.schema import keys, set_in
from lockstep.config.sft import SFTConfig
from lockstep.utils.checkpoint_folder import STEP_FOLDER

_CLIP_LOW, _CLIP_HIGH = "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high"
_ROLLOUT = "actor_rollout_ref.rollout"
_FREE_CACHE = f"{_ROLLOUT}.free_cache_engine"
_SERVER = f"{_ROLLOUT}.server"
_ROUTES = f"{_ROLLOUT}.enable_rollout_routing_replay"

_CORRECTION = "algorithm.rollout_correction"

PROGRAMS: dict[type, str] = {SFTConfig: "sft", RMConfig: "rm", DPOConfig: "dpo"}
"""Root config class of a program whose model is `model.path` -> its part of a run's name."""

IF_SET = (
    "algorithm.kl_ctrl.horizon",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctrl.target_kl",
    "algorithm.kl_ctrl.type",
    "algorithm.use_kl_in_reward",
    "data.use_dynamic_bsz",
    "trainer.experiment_name",
    "trainer.project_name",
    BATCH,
    MINI,
    _FREE_CACHE,
    _ROUTES,
    f"{_CORRECTION}.bypass_mode",
    f"{_CORRECTION}.rollout_is",
    f"{_ROLLOUT}.mode",
    f"{_ROLLOUT}.n",
)
"""Keys for which it matters whether the user set them: setting one to its default is a choice too."""

GROUP_SIZE = 5
"""Samples per prompt for estimators that compare them, unless the user sets `rollout.n`."""


def derived_defaults(
    cls: type, values: Mapping[str, Any], short: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Values derived from the keys that are set (canonical names), with one notice each.

    cls: the root config class. short: the short names by which keys were set.
    """
    derived: dict[str, Any] = {}
    notices: list[str] = []
    kl_keys = [name for name in IF_SET if name.startswith("algorithm.kl_ctrl.") and name in values]
    if kl_keys and "algorithm.use_kl_in_reward" not in values:
        derived["algorithm.use_kl_in_reward"] = True
        notices.append(
            f"{kl_keys[0]} is set, so the KL penalty in the reward is on; "
            "set algorithm.use_kl_in_reward=false to train without it"
        )
    estimator = values.get("algorithm.adv_estimator")
    if "actor_rollout_ref.rollout.n" not in values and _compares_samples(estimator):
        derived["actor_rollout_ref.rollout.n"] = GROUP_SIZE
        notices.append(
            f"actor_rollout_ref.rollout.n is not set; using {GROUP_SIZE}, because {estimator} compares the samples of a prompt"
        )
    if MINI in keys(cls):
        sizes, about_sizes = mini_batch_size(values, _resolved(BATCH, values), is_short="batch_size" in short)
        derived |= sizes
        notices += about_sizes
    derived |= {key: value for key, value in filled_by_tokens(values).items() if key in keys(cls)}
    if values.get("trainer.placement") in ("split", "standalone") and _FREE_CACHE not in values:
        derived[_FREE_CACHE] = False  # nobody else uses the memory
    if values.get(f"{_SERVER}.reload_command"):
        folders = {
            "weights_folder": "${trainer.default_local_dir}/rollout_weights",
            "weights_owner": "${trainer.default_local_dir}",
        }
        derived |= {f"{_SERVER}.{key}": path for key, path in folders.items() if values.get(f"{_SERVER}.{key}") is None}
    if values.get("actor_rollout_ref.actor.router_replay.mode") == "R3" and _ROUTES not in values:
        derived[_ROUTES] = True
    single = values.get("trainer.async_mode") is not None or values.get(f"{_ROLLOUT}.over_sample_rate")
    if single and f"{_ROLLOUT}.mode" not in values:
        derived[f"{_ROLLOUT}.mode"] = "async"  # both need single requests
    drift = _expected_drift(values)
    is_training = f"{_CORRECTION}.rollout_is" in keys(cls)
    if drift and is_training and not any(f"{_CORRECTION}.{name}" in values for name in ("rollout_is", "bypass_mode")):
        derived[f"{_CORRECTION}.rollout_is"] = "token"
        notices.append(
            f"{drift}, so their tokens are weighted by truncated importance ratios ({_CORRECTION}.rollout_is=token); set that key "
            "to null to train without"
        )
    if values.get(f"{_ROLLOUT}.exact") and not drift and f"{_CORRECTION}.bypass_mode" not in values:
        derived[f"{_CORRECTION}.bypass_mode"] = True  # the pass would compute the same numbers
    low, high = values.get(_CLIP_LOW), values.get(_CLIP_HIGH)
    loss = BUILT_IN_LOSSES.get(values.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla"), LossNeeds())
    if loss.clips_around_1 and isinstance(low, float) and isinstance(high, float) and 0.5 <= low < 1 < high < 2:
        derived[_CLIP_LOW], derived[_CLIP_HIGH] = round(1 - low, 12), round(high - 1, 12)
        notices.append(
            f"{_CLIP_LOW}={low:g} and {_CLIP_HIGH}={high:g} are read as the bounds of the ratio, so the distances from 1 are "
            f"{derived[_CLIP_LOW]:g} and {derived[_CLIP_HIGH]:g}; as distances they would clip at {1 - low:.4g} and "
            f"{1 + high:.4g}, which is hardly any clipping"
        )
    if cls is GenerationConfig and (lengths := _lengths_of_run(values)):
        derived |= lengths
        given = " and ".join(f"{name}={value}" for name, value in lengths.items())
        notices.append(f"{given}, as in the run of {values['model.path']}")
    return derived | _names(cls, values), notices


def _expected_drift(values: Mapping[str, Any]) -> str | None:
    """What makes samples differ from the trainer's policy, if something does."""
    if values.get("trainer.async_mode") is not None and values.get("trainer.max_staleness", 1) != 0:
        return "trainer.async_mode trains on samples of earlier policies"
    quantization = own_quantization(values, f"{_ROLLOUT}.")
    if quantization and not values.get(f"{_ROLLOUT}.exact"):
        settings = " and ".join(f"{key}={form}" for key, form in quantization.items())
        return f"{settings}: samples are of a policy that is not quite the trainer's"
    return None


def _lengths_of_run(values: Mapping[str, Any]) -> dict[str, int]:
    """The lengths that are not set, if the model is a checkpoint of RL: those that it was trained with."""
    path = Path(str(values.get("model.path") or "")).expanduser()
    steps = [folder for folder in (path, *path.parents) if STEP_FOLDER.fullmatch(folder.name)]
    files = [place / "config.yaml" for step in steps[:1] for place in (step, step.parent)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return {}
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))["data"]
        lengths = {f"data.{name}": data.get(name) for name in ("max_prompt_length", "max_response_length")}
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return {}
    return {name: value for name, value in lengths.items() if isinstance(value, int) and name not in values}


def _names(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Project and experiment, if they are not set."""
    model_key, algorithm = "actor_rollout_ref.model.path", values.get("algorithm.adv_estimator", "gae")
    if cls in PROGRAMS:
        model_key, algorithm = "model.path", PROGRAMS[cls]
    model = _resolved(model_key, values)
    files = _resolved("data.train_files", values) or _resolved("data.val_files", values)
    names = {
        "trainer.project_name": project_name(files),
        "trainer.experiment_name": experiment_name(model, files, algorithm),
    }
    return {name: value for name, value in names.items() if name not in values and name in keys(cls)}


def _resolved(name: str, values: Mapping[str, Any]) -> Any:
    """The value of a key, with interpolations such as `${oc.env:MODEL}` replaced if that is possible."""
    if "${" not in str(values.get(name)):
        return values.get(name)
    tree: dict[str, Any] = {}
    for key, value in values.items():
        set_in(tree, key, value)
    try:
        value = OmegaConf.select(OmegaConf.create(tree), name)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:  # `build` reports it
        return None


def _compares_samples(estimator: Any) -> bool:
    try:
        return isinstance(estimator, str) and needs_groups(estimator)
    except ConfigError:  # `checks` reports the unknown estimator
        return False
