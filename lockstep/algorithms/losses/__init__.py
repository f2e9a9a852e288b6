"""Losses of actor and critic: pure functions of (B, R) tensors that do not depend on the micro-batch split."""

from lockstep.algorithms.losses.aggregate import LOSS_AGG_MODES, agg_loss, count_batch
from lockstep.algorithms.losses.entropy import compute_entropy_loss, entropy_from_logits
from lockstep.algorithms.losses.policy import (
    POLICY_LOSSES,
    PolicyLossFn,
    batch_counts,
    compute_policy_loss,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)
from lockstep.algorithms.losses.value import compute_value_loss

__all__ = [
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "PolicyLossFn",
    "agg_loss",
    "batch_counts",
    "compute_entropy_loss",
    "compute_policy_loss",
    "compute_policy_loss_vanilla",
    "compute_value_loss",
    "count_batch",
    "entropy_from_logits",
    "get_policy_loss_fn",
    "register_policy_loss",
]
