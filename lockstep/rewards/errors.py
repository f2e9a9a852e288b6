"""What can go wrong when a reward function is called: a failed row (score 0, counted), or a reason to stop the run."""

from collections import Counter
from collections.abc import Sequence
from typing import Any


class RewardError(RuntimeError):
    """Scores cannot be trusted: stops the run. The message is one line with the cause."""


class AllRowsFailedError(RewardError):
    """Every row of a call failed.

    function, data_source: the reward function, and the data source of the first row.
    errors:                how often each exception came, by its repr, the first row's first.
    where:                 where the first row's was raised, as far as it is known.
    """

    def __init__(self, function: str, data_source: str, errors: dict[str, int], where: str) -> None:
        super().__init__(function, data_source, errors, where)
        self.function, self.data_source, self.errors, self.where = function, data_source, errors, where

    def __str__(self) -> str:
        return f"{self.what}. There is nothing to train on: fix the reward function"

    @property
    def what(self) -> str:
        (error, count), num_rows = next(iter(self.errors.items())), self.num_rows
        return (
            f"the reward function {self.function} failed on {num_rows} of {num_rows} samples, first on one of data_source "
            f"{self.data_source!r}; {count} of them with {error}{self.where and f' at {self.where}'}"
        )

    @property
    def num_rows(self) -> int:
        return sum(self.errors.values())

    @classmethod
    def of_calls(cls, calls: "Sequence[AllRowsFailedError]") -> "AllRowsFailedError":
        """The error of several calls as that of one call for all of their rows."""
        first = calls[0]
        errors = Counter[str]()
        for call in calls:
            errors.update(call.errors)
        joined = cls(first.function, first.data_source, dict(errors), first.where)
        joined.__cause__ = first.__cause__
        return joined


class WorkerStartError(RewardError):
    """No worker process could be started, or the function could not be loaded in it."""


class RewardHangError(RewardError):
    """Every call times out, or too many do; scoring the batch would take rows x `reward_model.timeout_s`."""


class RewardTimeoutError(RuntimeError):
    """A failed row: the call took longer than `reward_model.timeout_s`."""

    def __init__(self, timeout_s: float, where: str = "") -> None:
        at = f", at {where}" if where else ""
        super().__init__(f"the reward function took longer than reward_model.timeout_s={timeout_s:g}{at}")


class WorkerDiedError(RuntimeError):
    """A failed row: the call ended its process, twice."""


class Raised:
    """Pickled in place of an exception, and unpickled as it with a note; some exceptions lose theirs when they are pickled."""

    def __init__(self, error: Exception, note: str) -> None:
        self.error, self.note = error, note

    def __reduce__(self) -> tuple[Any, ...]:
        return with_note, (self.error, self.note)


def with_note(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error
