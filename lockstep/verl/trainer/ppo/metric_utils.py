"""verl.trainer.ppo.metric_utils"""

from lockstep.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    process_validation_metrics,
)
from lockstep.verl.utils.metric import reduce_metrics

__all__ = [
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]
