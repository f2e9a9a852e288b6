"""verl.trainer.ppo.reward: reward functions and managers from the config."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from lockstep.protocol import DataProto
from lockstep.rewards import custom, managers
from lockstep.rewards.default import default_compute_score as default_compute_score
from lockstep.rewards.managers import RewardFn
from lockstep.verl._config import typed_config


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    """The function of `custom_reward_function`; None if it is not set."""
    return custom.get_custom_reward_fn(typed_config(config, run_checks=False).custom_reward_function)


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any) -> RewardFn:
    """The manager of `reward_model.reward_manager`; `reward_kwargs` are added to those of the config.

    num_examine: responses per data source to print.
    As in verl, gsm8k gives no partial credit in training, which `lockstep ppo` does; see docs/migrate_from_verl.md.
    """
    typed = typed_config(config, run_checks=False)
    reward = replace(typed.reward_model, reward_kwargs={**typed.reward_model.reward_kwargs, **reward_kwargs})
    return managers.load_reward_manager(replace(typed, reward_model=reward), tokenizer, num_examine)


def compute_reward(data: DataProto, reward_fn: RewardFn) -> tuple[Tensor, dict[str, Any]]:
    """(reward tensor (B, R), extra information by name)."""
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})


def _compute_reward_async(
    data: DataProto, config: Any = None, tokenizer: Any = None, reward_fn: RewardFn | None = None
) -> tuple[Tensor, dict[str, Any]]:
    if reward_fn is None:
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0)
    return compute_reward(data, reward_fn)


def __getattr__(name: str) -> Any:
    if name == "compute_reward_async":  # a remote function: `ray.get(compute_reward_async.remote(...))`
        from lockstep.single_controller.ray_backend.cluster import ray

        return ray.remote(num_cpus=1)(_compute_reward_async)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
