"""verl.trainer.ppo.metric_utils"""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.trainer.ppo import metrics
from lockstep.trainer.ppo.metrics import (
    ValidationMetrics,
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from lockstep.verl.utils.metric import reduce_metrics

__all__ = [
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]

SEED = 42
"""Of the bootstrap draws."""


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_inputs: Sequence[Any],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = SEED,
) -> ValidationMetrics:
    """See `lockstep.trainer.ppo.metrics.process_validation_metrics`."""
    if seed != SEED:
        raise ValueError(f"process_validation_metrics(seed={seed}): the draws are always those of seed {SEED}")
    return metrics.process_validation_metrics(data_sources, sample_inputs, infos_dict)
