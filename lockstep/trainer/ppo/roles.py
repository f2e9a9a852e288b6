"""Which roles a config needs."""

from lockstep.algorithms.advantages import needs_values
from lockstep.config.ppo import PPOConfig


def need_critic(config: PPOConfig) -> bool:
    if config.critic.enable is not None:
        return config.critic.enable
    return needs_values(config.algorithm.adv_estimator)


def need_reference_policy(config: PPOConfig) -> bool:
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def need_reward_model(config: PPOConfig) -> bool:
    return config.reward_model.enable


def needed_models(config: PPOConfig) -> list[str]:
    """The models beside the policy, of ref, critic and rm."""
    needed = {"ref": need_reference_policy(config), "critic": need_critic(config), "rm": need_reward_model(config)}
    return [role for role, is_needed in needed.items() if is_needed]
