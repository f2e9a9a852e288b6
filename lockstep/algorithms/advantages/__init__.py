"""Advantage estimators: one family per file; importing this package registers them all."""

from lockstep.algorithms.advantages.egpo import compute_egpo_outcome_advantage
from lockstep.algorithms.advantages.gae import compute_gae_advantage_return
from lockstep.algorithms.advantages.gdpo import compute_gdpo_outcome_advantage
from lockstep.algorithms.advantages.gpg import compute_gpg_outcome_advantage
from lockstep.algorithms.advantages.grpo import compute_grpo_outcome_advantage, compute_grpo_passk_outcome_advantage
from lockstep.algorithms.advantages.maxrl import compute_maxrl_outcome_advantage
from lockstep.algorithms.advantages.opo import compute_opo_outcome_advantage
from lockstep.algorithms.advantages.otb import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from lockstep.algorithms.advantages.registry import (
    ADVANTAGE_ESTIMATORS,
    AdvantageFn,
    check_inputs,
    get_adv_estimator_fn,
    parameters_of,
    register_adv_est,
)
from lockstep.algorithms.advantages.reinforce import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from lockstep.algorithms.advantages.rloo import (
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.config.estimators import needs_groups, needs_values, required_inputs

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "AdvantageFn",
    "check_inputs",
    "compute_egpo_outcome_advantage",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_maxrl_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "get_adv_estimator_fn",
    "needs_groups",
    "needs_values",
    "parameters_of",
    "register_adv_est",
    "required_inputs",
]
