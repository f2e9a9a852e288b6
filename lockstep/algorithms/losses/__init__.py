"""Actor and critic losses: pure functions of (B, R) tensors, independent of the micro-batch split."""

from lockstep.algorithms.losses.aggregate import LOSS_AGG_MODES, agg_loss, count_batch
from lockstep.algorithms.losses.bypass import compute_policy_loss_bypass_mode
from lockstep.algorithms.losses.covariance import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from lockstep.algorithms.losses.dppo import compute_policy_loss_dppo_kl, compute_policy_loss_dppo_tv
from lockstep.algorithms.losses.entropy import compute_entropy_loss, entropy_from_logits
from lockstep.algorithms.losses.gradient import (
    compute_policy_loss_cispo,
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_reinforce,
)
from lockstep.algorithms.losses.policy import (
    POLICY_LOSSES,
    PolicyLossFn,
    compute_policy_loss,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    prepare_policy_loss,
    register_policy_loss,
)
from lockstep.algorithms.losses.preparation import MiniBatch, Prepare
from lockstep.algorithms.losses.sapo import compute_policy_loss_sapo
from lockstep.algorithms.losses.sequence import compute_policy_loss_geo_mean, compute_policy_loss_gspo
from lockstep.algorithms.losses.value import compute_value_loss

__all__ = [
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "MiniBatch",
    "PolicyLossFn",
    "Prepare",
    "agg_loss",
    "compute_entropy_loss",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_value_loss",
    "count_batch",
    "entropy_from_logits",
    "get_policy_loss_fn",
    "prepare_policy_loss",
    "register_policy_loss",
]
