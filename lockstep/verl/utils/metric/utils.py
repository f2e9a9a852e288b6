"""verl.utils.metric.utils"""

from lockstep.verl.utils.metric import reduce_metrics

__all__ = ["reduce_metrics"]
