"""Correction for rollouts whose log-probs differ from the trainer's: importance weights, rejection, metrics.

log r = log-prob under the trainer's policy - log-prob under the rollout's, per token

    weights.py    r per token or per sequence, truncated     -> rollout_is_weights
    rejection.py  drops tokens and sequences too far off     -> response_mask
    distance.py   KL, perplexities and chi-squared           -> metrics
    correct.py    all three, on tensors and on the batch
"""

from lockstep.algorithms.rollout_correction.correct import (
    apply_rollout_correction,
    compute_rollout_correction_and_rejection_mask,
    use_rollout_log_probs,
)
from lockstep.algorithms.rollout_correction.distance import compute_offpolicy_metrics
from lockstep.algorithms.rollout_correction.rejection import REJECTIONS, compute_rollout_rejection_mask
from lockstep.algorithms.rollout_correction.weights import compute_rollout_correction_weights

__all__ = [
    "REJECTIONS",
    "apply_rollout_correction",
    "compute_offpolicy_metrics",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "use_rollout_log_probs",
]
