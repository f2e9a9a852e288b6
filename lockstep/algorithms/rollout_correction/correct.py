"""The whole correction, on tensors and on a batch."""

from torch import Tensor

from lockstep.algorithms.rollout_correction.distance import compute_offpolicy_metrics
from lockstep.algorithms.rollout_correction.rejection import compute_rollout_rejection_mask
from lockstep.algorithms.rollout_correction.summary import Metrics
from lockstep.algorithms.rollout_correction.weights import compute_rollout_correction_weights
from lockstep.config.algorithm import RolloutCorrectionConfig
from lockstep.protocol import DataProto
from lockstep.protocol.tokens import column, read

PREFIX = "rollout_corr/"


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """(weights, mask, metrics): `rollout_is_weights` in a DataProto, None if `rollout_is` is; the mask after rejection.

    All tensors (B, R). Metrics are numbers under rollout_corr/.
    """
    weights, mask, metrics = correct_tokens(
        old_log_prob,
        rollout_log_prob,
        response_mask,
        RolloutCorrectionConfig(
            rollout_is=rollout_is,  # type: ignore[arg-type]  # checked on use
            rollout_is_threshold=rollout_is_threshold,
            rollout_is_batch_normalize=rollout_is_batch_normalize,
            rollout_rs=rollout_rs,
            rollout_rs_threshold=rollout_rs_threshold,
        ),
    )
    batch = None if weights is None else DataProto.from_dict(tensors={"rollout_is_weights": weights})
    return batch, mask, {name: float(value) for name, value in metrics.items()}


def correct_tokens(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Weights (None without `rollout_is`), mask after rejection, and metrics as scalar tensors under rollout_corr/."""
    if not old_log_prob.shape == rollout_log_prob.shape == response_mask.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (old_log_prob, rollout_log_prob, response_mask))
        raise ValueError(f"old and rollout log-probs and the response mask differ in shape: {shapes}")
    if not response_mask.any():
        raise ValueError("rollout correction needs at least one token with response_mask 1")
    log_ratio = old_log_prob.detach() - rollout_log_prob.detach()
    weights = None
    mask = response_mask.clone()
    metrics: Metrics = {}
    if config.rollout_is is not None:
        weights, weight_metrics = compute_rollout_correction_weights(
            log_ratio, response_mask, config.rollout_is, config.rollout_is_threshold, config.rollout_is_batch_normalize
        )
        metrics |= weight_metrics
    if config.rollout_rs is not None:
        mask, rejection_metrics = compute_rollout_rejection_mask(
            log_ratio, response_mask, config.rollout_rs, config.rollout_rs_threshold
        )
        metrics |= rejection_metrics
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return weights, mask, {PREFIX + name: value for name, value in metrics.items()}


def apply_rollout_correction(batch: DataProto, config: RolloutCorrectionConfig) -> tuple[DataProto, dict[str, float]]:
    """Write `rollout_is_weights` and the reduced `response_mask` into the batch; returns it and the metrics.

    Reads old_log_probs, rollout_log_probs and response_mask. No-op if neither `rollout_is` nor `rollout_rs` is set,
    and in bypass mode, whose loss applies the correction with the current policy.
    """
    if config.bypass_mode or (config.rollout_is is None and config.rollout_rs is None):
        return batch, {}
    tensors = batch.tensors
    weights, mask, metrics = correct_tokens(
        read(tensors, "old_log_probs"), _rollout_log_probs(batch), read(tensors, "response_mask"), config
    )
    tensors["response_mask"] = mask
    if weights is not None:
        tensors["rollout_is_weights"] = weights
    return batch, {name: float(value) for name, value in metrics.items()}


def use_rollout_log_probs(batch: DataProto) -> DataProto:
    """Bypass mode: use the rollout's log-probs as `old_log_probs`."""
    _require_rollout_log_probs(batch)
    batch.tensors["old_log_probs"] = column(batch.tensors, "rollout_log_probs")
    return batch


def _rollout_log_probs(batch: DataProto) -> Tensor:
    _require_rollout_log_probs(batch)
    return read(batch.tensors, "rollout_log_probs")


def _require_rollout_log_probs(batch: DataProto) -> None:
    if "rollout_log_probs" not in batch.tensors:
        raise ValueError(
            "algorithm.rollout_correction needs the rollout's log-probs: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        )
