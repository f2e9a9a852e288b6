"""verl.utils.metric"""

from lockstep.verl._names import exports

__getattr__ = exports(__name__, {"lockstep.verl.utils.metric.utils": ("AggregationType", "Metric", "reduce_metrics")})
