"""The micro-batch sizes that out of memory has lowered in a run: logged, reported as metrics, and part of its checkpoints.

engine lowers a size ─► note ─► warning, metrics ─► state of the trainer ─► the resumed run's engines
"""

import logging
from collections.abc import Sequence
from typing import Any

from lockstep.config.micro_batches import RL, SUPERVISED
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import flat_values
from lockstep.config.sft import SupervisedConfig

logger = logging.getLogger(__name__)

STATE = "smaller_micro_batches"
"""Entry of the trainer's state in a checkpoint."""


class SmallerMicroBatches:
    """sizes: config key (`num_rows` of an audit's trials) -> tokens or sequences of a micro-batch, smaller than the key's value.

    num_retries: mini-batches and passes that were computed again, and restarts.
    """

    def __init__(self, config: PPOConfig | SupervisedConfig) -> None:
        phases = RL if isinstance(config, PPOConfig) else SUPERVISED
        self._phases = {key: phase for phase, keys in phases.items() for key in (keys.tokens, keys.rows)}
        if isinstance(config, SupervisedConfig):
            self._phases = dict.fromkeys(self._phases, "update")
        values = flat_values(config)
        self._configured = {key: values[key] for key in self._phases}
        self.sizes: dict[str, int] = {}
        self.num_retries = 0

    def add(self, lowered: Sequence[tuple[str, int]]) -> None:
        """Config keys and sizes, in the order in which they were lowered."""
        self.num_retries += len(lowered)
        self.sizes |= dict(lowered)

    def note(self, lowered: Sequence[tuple[str, int]]) -> None:
        """`add`, and log the last size of each key."""
        for key, size in dict(lowered).items():
            before = self.sizes.get(key, self._configured.get(key))
            logger.warning(
                "out of memory with %s=%s: computed again, and from now on, with %d; set the key to that to save the retries",
                key,
                "all" if before is None else before,
                size,
            )
        self.add(lowered)

    def metrics(self) -> dict[str, float]:
        """Empty if there was always enough memory."""
        if not self.num_retries:
            return {}
        phases = {self._phases[key]: size for key, size in self.sizes.items() if key in self._phases}
        names = {phase: phase.replace(" ", "_").replace("-", "_") for phase in phases}
        sizes = {f"perf/micro_batch_size/{names[phase]}": float(size) for phase, size in phases.items()}
        return {"perf/out_of_memory_retries": float(self.num_retries)} | sizes

    def state(self) -> dict[str, Any]:
        """For the state of the trainer: empty if there was always enough memory."""
        if not self.num_retries:
            return {}
        sizes = {key: {"configured": self._configured.get(key), "size": size} for key, size in self.sizes.items()}
        return {STATE: {"sizes": sizes, "num_retries": self.num_retries}}

    def load(self, state: dict[str, Any]) -> None:
        """From the state of the trainer; a size whose key has another value now is dropped."""
        saved = state.get(STATE, {"sizes": {}, "num_retries": 0})
        self.num_retries += saved["num_retries"]
        for key, entry in saved["sizes"].items():
            if self._configured.get(key) == entry["configured"]:
                self.sizes[key] = min(entry["size"], self.sizes.get(key, entry["size"]))
                logger.info(
                    "%s=%d stays, after out of memory; another value of the key replaces it", key, self.sizes[key]
                )
