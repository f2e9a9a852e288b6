"""verl.workers.sharding_manager.fsdp_ulysses: ranks of the mesh dimension `sp` compute on the same rows."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from lockstep.protocol import DataProto
from lockstep.verl.protocol import all_gather_data_proto
from lockstep.verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group
from lockstep.verl.workers.sharding_manager.base import BaseShardingManager as BaseShardingManager


class FSDPUlyssesShardingManager(BaseShardingManager):
    """Inside, the group of `verl.utils.ulysses` is this rank's group of the mesh dimension `sp`; no-op without a mesh."""

    def __init__(self, device_mesh: DeviceMesh | None) -> None:
        self.device_mesh = device_mesh
        self._before: Any = None

    def __enter__(self) -> Any:
        if self.device_mesh is not None:
            self._before = get_ulysses_sequence_parallel_group()
            set_ulysses_sequence_parallel_group(self.device_mesh["sp"].get_group())
        return self

    def __exit__(self, *exc: object) -> None:
        if self.device_mesh is not None:
            set_ulysses_sequence_parallel_group(self._before)

    def preprocess_data(self, data: DataProto) -> DataProto:
        """The rows of all ranks of the group."""
        if self.device_mesh is not None:
            all_gather_data_proto(data, self.device_mesh["sp"].get_group())
        return data

    def postprocess_data(self, data: DataProto) -> DataProto:
        """This rank's own rows again."""
        if self.device_mesh is None:
            return data
        sequence = self.device_mesh["sp"]
        return data.chunk(sequence.size())[sequence.get_local_rank()]
