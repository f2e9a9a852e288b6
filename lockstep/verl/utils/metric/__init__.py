"""verl.utils.metric"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.verl._names import exports

__getattr__ = exports(__name__)


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number per name: the maximum for names with max, the minimum for names with min, the mean for all others."""
    return {name: float(_reduction(name)(values)) for name, values in metrics.items()}


def _reduction(name: str) -> Any:
    return np.max if "max" in name else np.min if "min" in name else np.mean
