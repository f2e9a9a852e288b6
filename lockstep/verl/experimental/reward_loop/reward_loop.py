"""verl.experimental.reward_loop.reward_loop"""

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.verl._names import exports

__getattr__ = exports(__name__)

MOVED = {
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
    "sandbox_fusion": "reward.sandbox_fusion",
    **{f"reward_model.{name}": f"reward.reward_model.{name}" for name in ("enable", "enable_resource_pool")},
    **{f"reward_model.{name}": f"reward.reward_model.{name}" for name in ("n_gpus_per_node", "nnodes", "rollout")},
    "reward_model.model.path": "reward.reward_model.model_path",
}
"""verl's older keys -> its newer ones."""


def migrate_legacy_reward_impl(config: DictConfig) -> DictConfig:
    """Set verl's newer `reward.*` keys from the older ones that are set, in place; Lockstep reads both. Returns the config."""
    with open_dict(config):
        for older, newer in MOVED.items():
            value = OmegaConf.select(config, older)
            if not _is_unset(value):
                OmegaConf.update(config, newer, value, merge=True, force_add=True)
    return config


def _is_unset(value: Any) -> bool:
    return all(map(_is_unset, value.values())) if isinstance(value, DictConfig) else value is None
