"""verl.workers.actor.base"""

from abc import ABC, abstractmethod
from typing import Any

from lockstep.protocol import DataProto


class BasePPOActor(ABC):
    """A policy that a program updates itself."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> dict[str, Any]:
        """`log_probs` of the responses, and `entropys` if asked for."""

    @abstractmethod
    def update_policy(self, data: DataProto) -> dict[str, Any]:
        """Update from a batch with advantages; returns metrics."""
