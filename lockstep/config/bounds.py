"""Types of bounded config fields: `n: PositiveInt = 1`. `schema.out_of_bounds` checks the values; null is always allowed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from lockstep.utils.sampling_limits import MAX_TEMPERATURE


@dataclass(frozen=True)
class Bound:
    """Which values a field allows, and the message about another one; written as `Annotated[float, Bound(...)]`."""

    allows: Callable[[Any], bool]
    message: str


_POSITIVE = Bound(lambda x: x > 0, "must be greater than 0")
_NOT_NEGATIVE = Bound(lambda x: x >= 0, "must be 0 or more")

PositiveInt = Annotated[int, _POSITIVE]
PositiveFloat = Annotated[float, _POSITIVE]
NonNegativeInt = Annotated[int, _NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, _NOT_NEGATIVE]
PortNumber = Annotated[int, Bound(lambda x: 0 <= x <= 65535, "must be 0 to 65535")]
UnitFloat = Annotated[float, Bound(lambda x: 0 <= x <= 1, "must be between 0 and 1")]
PositiveFraction = Annotated[float, Bound(lambda x: 0 < x <= 1, "must be greater than 0 and at most 1")]
CountOrAll = Annotated[int, Bound(lambda x: x == -1 or x >= 1, "must be 1 or more, or -1 for all")]
Temperature = Annotated[float, Bound(lambda x: 0 <= x <= MAX_TEMPERATURE, f"must be 0 to {MAX_TEMPERATURE:g}")]
Betas = Annotated[
    tuple[float, float],
    Bound(lambda pair: all(0 <= x < 1 for x in pair), "must be two numbers of at least 0 and below 1"),
]
NumSteps = Annotated[int, Bound(lambda x: x >= 1, "must be 1 or more, or null for all epochs")]
StepNumbers = Annotated[
    list[int], Bound(lambda steps: all(step >= 1 for step in steps), "must be steps, the first of which is 1")
]
SecondsByName = Annotated[
    dict[str, float],
    Bound(
        lambda seconds: all(isinstance(x, int | float) and x > 0 for x in seconds.values()),
        "must be seconds greater than 0, by name",
    ),
]
EveryOrNever = Annotated[int, Bound(lambda x: x == -1 or x >= 1, "must be 1 or more, or -1 for never")]
SaveFrequency = Annotated[int, Bound(lambda x: x >= -1, "must be 1 or more, -1 for only the last step, or 0 for never")]
