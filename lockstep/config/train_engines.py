"""The section of the training engine that the `strategy` of a role selects, and how many ranks share its rows."""

from typing import Any

from lockstep.config.engines import TRAIN_ENGINES
from lockstep.config.model import TrainEngineConfig


def engine_settings(role: Any) -> TrainEngineConfig:
    """Settings of the role's training engine. role: a section with `strategy`."""
    name = TRAIN_ENGINES.info(role.strategy).section
    found: TrainEngineConfig = getattr(role if hasattr(role, name) else role.model, name)
    return found


def ranks_per_row(role: Any) -> int:
    """Ranks of the role that compute on the same rows. Ulysses' key may be set in the role's section or in the engine's."""
    return max(engine_settings(role).ranks_per_row, _own_sequence_ranks(role))


def ranks_per_sequence(role: Any) -> int:
    """Ranks that hold different tokens of a sequence: micro-batches may be that many times as large."""
    return max(engine_settings(role).ranks_per_sequence, _own_sequence_ranks(role))


def _own_sequence_ranks(role: Any) -> int:
    own: int = getattr(role, "ulysses_sequence_parallel_size", 1)
    return own if TRAIN_ENGINES.info(role.strategy).sequence_parallel else 1
