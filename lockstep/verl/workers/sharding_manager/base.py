"""verl.workers.sharding_manager.base"""

from typing import Any

from lockstep.protocol import DataProto


class BaseShardingManager:
    """A context in which a worker computes; batches pass through on their way in and out."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def preprocess_data(self, data: DataProto) -> DataProto:
        return data

    def postprocess_data(self, data: DataProto) -> DataProto:
        return data
