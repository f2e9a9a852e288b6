"""From scores to advantages, on the controller.

scores ─► KL penalty ─► rewards ─► rollout correction: weights, rejected tokens ─► estimator ─► advantages ─► rows to train on
"""

from typing import Any

from lockstep.algorithms.advantages import check_inputs, get_adv_estimator_fn
from lockstep.algorithms.compute_advantage import compute_advantage
from lockstep.algorithms.kl import KLController, apply_kl_penalty
from lockstep.algorithms.pf_ppo import pf_ppo_rows
from lockstep.algorithms.rollout_correction import apply_rollout_correction
from lockstep.config.placement import need_critic
from lockstep.config.plugin_settings import estimator_settings
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto
from lockstep.protocol.tokens import column, pack
from lockstep.trainer.ppo import forks


def check_estimator(config: PPOConfig) -> None:
    """ValueError if the estimator reads a batch key that this run does not have, or does not take its `adv_kwargs`."""
    keys = {"index", "old_log_probs", "rollout_log_probs", "reward_baselines", "token_level_scores"}
    if need_critic(config):
        keys.add("values")
    if not config.algorithm.rollout_correction.bypass_mode:
        keys |= {"entropys", "sum_pi_squared"}
    check_inputs(config.algorithm.adv_estimator, keys)
    estimator_settings(get_adv_estimator_fn(config.algorithm.adv_estimator), config.algorithm.adv_kwargs)


def add_advantages(
    batch: DataProto, config: PPOConfig, kl_ctrl: KLController, step: int
) -> tuple[DataProto, DataProto, dict[str, Any]]:
    """KL penalty, rollout correction, advantages: (the batch, the rows to train on, metrics)."""
    algorithm = config.algorithm
    metrics: dict[str, Any] = {}
    rows = forks.joined(batch)
    if algorithm.use_kl_in_reward:
        rows, metrics = apply_kl_penalty(rows, kl_ctrl, algorithm.kl_penalty)
    else:
        rows.tensors["token_level_rewards"] = column(rows.tensors, "token_level_scores")
    all_tokens = column(rows.tensors, "response_mask")
    rows, correction_metrics = apply_rollout_correction(rows, algorithm.rollout_correction)
    # rejected tokens have no loss, but their reward still belongs to the tokens before them
    kept_tokens = column(rows.tensors, "response_mask")
    rows.tensors["response_mask"] = all_tokens
    rows = compute_advantage(
        rows,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    rows.tensors["response_mask"] = kept_tokens
    batch = pack(forks.split(batch, rows))
    chosen = batch
    if algorithm.use_pf_ppo:
        rule = algorithm.pf_ppo
        chosen = forks.choose(batch, pf_ppo_rows(rows, rule.reweight_method, rule.weight_pow, step))
    return batch, chosen, metrics | correction_metrics
