"""Statistics over the tokens of a mask, as metrics."""

import torch
from torch import Tensor

from lockstep.utils.masked import masked_mean

Metrics = dict[str, Tensor]
"""Name to a detached scalar tensor, to avoid device synchronization."""


def extremes(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Largest and smallest value under the mask."""
    masked = ~mask.bool()
    return values.masked_fill(masked, -torch.inf).max(), values.masked_fill(masked, torch.inf).min()


def clamped_std(values: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Biased standard deviation under the mask of the values clamped to [low, high]."""
    clamped = values.clamp(low, high)
    return (masked_mean(clamped**2, mask) - masked_mean(clamped, mask) ** 2).clamp(min=0.0).sqrt()


def sequence_statistics(prefix: str, values_B: Tensor, ideal: float) -> Metrics:
    """Mean, standard deviation, extremes and largest distance to `ideal` of one value per sequence."""
    return {
        f"{prefix}_seq_mean": values_B.mean(),
        f"{prefix}_seq_std": values_B.std() if len(values_B) > 1 else torch.zeros_like(values_B.sum()),
        f"{prefix}_seq_max": values_B.max(),
        f"{prefix}_seq_min": values_B.min(),
        f"{prefix}_seq_max_deviation": (values_B - ideal).abs().max(),
    }


def fraction(condition: Tensor) -> Tensor:
    return condition.float().mean()
