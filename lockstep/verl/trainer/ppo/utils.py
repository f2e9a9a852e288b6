"""verl.trainer.ppo.utils: roles, and which of them a run needs."""

from collections.abc import Mapping
from typing import Any

from lockstep.config import placement
from lockstep.single_controller import Role as Role, Worker

WorkerType = type[Worker]


def need_critic(config: Any) -> bool:
    return placement.need_critic(config)


def need_reference_policy(config_or_workers: Any) -> bool:
    """From the config, or from the program's role-to-worker mapping."""
    if isinstance(config_or_workers, Mapping) and _are_roles(config_or_workers):
        return Role.RefPolicy in config_or_workers or Role.ActorRolloutRef in config_or_workers
    return placement.need_reference_policy(config_or_workers)


def need_reward_model(config_or_workers: Any) -> bool:
    """From the config, or from the program's role-to-worker mapping."""
    if isinstance(config_or_workers, Mapping) and _are_roles(config_or_workers):
        return Role.RewardModel in config_or_workers
    return placement.need_reward_model(config_or_workers)


def _are_roles(mapping: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, Role) for key in mapping)
