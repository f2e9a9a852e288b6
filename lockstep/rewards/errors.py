"""What can go wrong when a reward function is called: a failed row (score 0, counted), or a reason to stop the run."""

from typing import Any


class RewardError(RuntimeError):
    """Scores cannot be trusted: stops the run. The message is one line with the cause."""


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
