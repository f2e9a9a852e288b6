"""Where the old log-probs of a step come from: one rule for the trainer and for `lockstep plan`, which does not import torch."""

from typing import Literal

from lockstep.config.estimators import may_read
from lockstep.config.plugin_settings import is_prepared
from lockstep.config.ppo import PPOConfig

OldLogProbs = Literal["rollout", "update", "pass"]


def old_log_probs_source(config: PPOConfig, *, is_one_update: bool) -> OldLogProbs:
    """The `rollout`, the `update` itself, or a separate forward `pass`. is_one_update: the step updates the actor once."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction, loss = algorithm.rollout_correction, actor.policy_loss.loss_mode
    if correction.bypass_mode:
        return "rollout"
    read_before = (
        algorithm.use_kl_in_reward
        or algorithm.use_pf_ppo
        or correction.rollout_is is not None
        or correction.rollout_rs is not None
        or is_prepared(loss)
        or may_read(algorithm.adv_estimator, "old_log_probs", "entropys", "sum_pi_squared")
    )
    return "update" if is_one_update and not read_before and actor.old_log_prob_pass == "auto" else "pass"
