"""The error of a broken invariant, and the distance between the rollout's log-probs and the trainer's."""

import torch
from torch import Tensor

from lockstep.utils.device import HostCopy

MAX_LOG_PROB_GAP = 0.5
"""Mean |log p_rollout - log p_trainer| above which the two cannot be the same policy."""


class AuditError(RuntimeError):
    """A step broke an invariant; the message names it."""


class RolloutGap:
    """How far the rollout's probabilities are from the trainer's, gathered over parts of a batch."""

    def __init__(self) -> None:
        self._sums: list[HostCopy] = []
        self._largest: list[HostCopy] = []

    @torch.no_grad()
    def add(self, rollout: Tensor, trainer: Tensor, mask: Tensor) -> None:
        """Log-probs of one part, (B, R)."""
        chosen = mask.bool()
        distance = (rollout - trainer).abs().masked_fill(~chosen, 0.0)
        difference = (rollout.exp() - trainer.exp()).abs().masked_fill(~chosen, 0.0)
        sums = torch.stack([chosen.sum(), distance.sum(), difference.sum(), (difference**2).sum()])
        self._sums.append(HostCopy(sums))
        self._largest.append(HostCopy(difference.max()))

    def sums(self) -> list[float]:
        """What `metrics` takes, added over all parts; to be added over ranks too where each has parts of its own."""
        if not self._sums:
            return [0.0] * 4
        values: list[float] = torch.stack([part.read() for part in self._sums]).double().sum(0).tolist()
        return values

    def metrics(self, count: float, distance: float, difference: float, squares: float) -> dict[str, float]:
        """From the sums over everything; the largest difference is of this rank's parts. Empty where there was no token."""
        if not count:
            return {}
        mean = difference / count
        variance = (squares - count * mean**2) / (count - 1) if count > 1 else 0.0
        return {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": max((float(part.read()) for part in self._largest), default=0.0),
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_std": max(variance, 0.0) ** 0.5,
            "training/rollout_log_probs_gap": distance / count,
        }


def check_gap(metrics: dict[str, float]) -> None:
    """AuditError where the metrics of a `RolloutGap` say that rollout and trainer are of different policies."""
    gap = metrics.get("training/rollout_log_probs_gap", 0.0)
    if not gap <= MAX_LOG_PROB_GAP:
        raise AuditError(
            f"the rollout's log-probs differ from the trainer's by {gap:.3f} a token on average: the rollout does not "
            "run the trainer's weights, or scores another distribution (temperature)"
        )
