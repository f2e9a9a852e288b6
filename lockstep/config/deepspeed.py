"""`deepspeed`: settings of the DeepSpeed engine, beside the `fsdp_config` of each role."""

from dataclasses import dataclass
from typing import Literal

from lockstep.config.model import TrainEngineConfig


@dataclass(frozen=True)
class DeepSpeedEngineConfig(TrainEngineConfig):
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is sharded over the ranks: 1 optimizer state, 2 gradients too, 3 parameters too; 0 nothing."""
    config_path: str | None = None
    """A DeepSpeed JSON file. Its values win over the keys here; batch sizes, optimizer and scheduler are the run's."""
