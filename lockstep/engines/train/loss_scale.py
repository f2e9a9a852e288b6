"""Dynamic loss scaling: float16 gradients underflow unless the loss is multiplied before the backward pass."""

import logging
import math

logger = logging.getLogger(__name__)


class LossScale:
    """The factor of the loss: halved by a step whose gradient is not finite, doubled after many good steps in a row.

    enabled: whether the compute type needs it (float16); otherwise the factor is 1 and such a gradient is an error.
    """

    INITIAL = 2.0**16
    GROWTH_INTERVAL = 2000
    MAX_SKIPPED = 20
    """Steps in a row that may be skipped; scales of 2**16 and less are used up before."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = self.INITIAL if enabled else 1.0
        self._good = self._skipped = 0

    def update(self, norm: float) -> None:
        """Take note of a step by its gradient norm; FloatingPointError if no scale can help."""
        if math.isfinite(norm):
            self._good += 1
            self._skipped = 0
            if self.enabled and self._good % self.GROWTH_INTERVAL == 0:
                self.value *= 2
            return
        self._good = 0
        self._skipped += 1
        if not self.enabled:
            raise FloatingPointError(
                f"the gradient norm is {norm}: the loss or the model produced a number that is not finite. "
                "No step was taken; the last checkpoint is intact"
            )
        self.value /= 2
        if self.value < 1 or self._skipped >= self.MAX_SKIPPED:
            raise FloatingPointError(
                f"the gradient norm is {norm} for {self._skipped} optimizer steps in a row, down to a loss scale of "
                f"{self.value}: the model does not train in float16. No step was taken; the last checkpoint is intact. "
                "Set fsdp_config.dtype=bfloat16"
            )
        logger.warning("gradient norm is %s: optimizer step skipped, loss scale is now %g", norm, self.value)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good": self._good, "skipped": self._skipped} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.enabled and state:  # empty in the checkpoint of a run that did not scale
            self.value = state["value"]
            self._good = int(state["good"])
            self._skipped = int(state["skipped"])
