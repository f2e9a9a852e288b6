"""Numbers in JSON and YAML that others wrote."""

import math
from typing import Any


def number(value: Any) -> float | None:
    """A finite number, or None; an integer that no float can hold is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
