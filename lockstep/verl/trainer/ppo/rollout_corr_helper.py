"""verl.trainer.ppo.rollout_corr_helper"""

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import OmegaConf

from lockstep.algorithms import rollout_correction
from lockstep.algorithms.rollout_correction import (
    apply_rollout_correction,
    compute_rollout_correction_and_rejection_mask as compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights as compute_rollout_correction_weights,
    compute_rollout_rejection_mask as compute_rollout_rejection_mask,
    use_rollout_log_probs,
)
from lockstep.algorithms.rollout_correction.rejection import REJECTIONS
from lockstep.config.algorithm import RolloutCorrectionConfig
from lockstep.config.schema import to_dataclass
from lockstep.protocol import DataProto

SUPPORTED_ROLLOUT_RS_OPTIONS = frozenset(REJECTIONS)
"""Criteria of `rollout_rs`."""


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: RolloutCorrectionConfig | Mapping[str, Any]
) -> tuple[DataProto, dict[str, float]]:
    """Write the importance weights and the reduced mask into the batch; returns it and the metrics."""
    return apply_rollout_correction(batch, _typed(rollout_corr_config))


def apply_bypass_mode(batch: DataProto, *unused: Any, **options: Any) -> None:
    """Use the rollout's log-probs as the old ones. Further arguments set the policy loss in verl, which the config does here."""
    use_rollout_log_probs(batch)


def compute_offpolicy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor | None, response_mask: torch.Tensor
) -> dict[str, float]:
    """Distances between trainer and rollout as numbers; without the rollout's log-probs only the trainer's perplexity."""
    if rollout_log_prob is None:
        metrics = rollout_correction.compute_offpolicy_metrics(old_log_prob, old_log_prob, response_mask)
        metrics = {name: metrics[name] for name in ("training_ppl", "training_log_ppl")}
    else:
        metrics = rollout_correction.compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return {name: float(value) for name, value in metrics.items()}


def _typed(config: RolloutCorrectionConfig | Mapping[str, Any]) -> RolloutCorrectionConfig:
    if isinstance(config, RolloutCorrectionConfig):
        return config
    plain: Any = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    return to_dataclass(RolloutCorrectionConfig, plain)
