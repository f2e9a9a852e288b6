"""Who follows a training run from within: `lockstep replay` records a step."""

from typing import Any


class StepObserver:
    """Is told what a trainer does. This one does nothing; a subclass overrides what it wants to know.

    trainer: a `PPOTrainer`, whose batches are `DataProto`, or a `SupervisedTrainer`, whose batches are of all ranks.
    """

    def started(self, trainer: Any) -> None:
        """The checkpoint is loaded and the run is open; its first step is next."""

    def updating(self, trainer: Any, batch: Any) -> None:
        """The models are updated on the batch next."""

    def updated(self, trainer: Any, batch: Any) -> None:
        """The step is computed; its metrics are logged next. batch: of the step."""
