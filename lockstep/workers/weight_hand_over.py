"""The two ends of a weight hand-over, as methods of the policy's worker."""

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.engines.rollout.base import RolloutEngine
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.models.loading import resolve_dtype
from lockstep.single_controller import Dispatch, Worker, register
from lockstep.workers.weight_transfer import (
    BroadcastGroup,
    Layout,
    fingerprint,
    fingerprint_of,
    layout_of,
    open_store,
    pack_buckets,
    unpack_bucket,
)


class WeightHandOver(Worker):
    """What a worker of role actor (with `actor`) and one of role rollout (with `rollout` and `generator`) do for it."""

    config: ActorRolloutRefConfig
    device: torch.device
    is_actor: bool
    actor: FsdpEngine
    rollout: RolloutEngine
    generator: nn.Module

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_layout(self) -> Layout:
        """Actor: what its buckets hold."""
        megabytes = self.config.rollout.checkpoint_engine.update_weights_bucket_megabytes
        dtype = resolve_dtype(self.config.actor.fsdp_config.dtype, self.device)
        model = self.actor.model
        shapes = [(model.hf_name(name), tuple(parameter.shape)) for name, parameter in model.named_parameters()]
        self._layout = layout_of(shapes, dtype, megabytes << 20)
        return self._layout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def expect_weights(self, layout: Layout) -> None:
        """Rollout: what will come."""
        self._layout = layout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def weight_bucket(self, index: int) -> np.ndarray | None:
        """Actor: one bucket after the other, on rank 0; all ranks take part in gathering it."""
        if index == 0:
            self._stream = self._buckets()
        flat = next(self._stream)
        if index == len(self._layout) - 1:
            self._stream.close()
        return flat.cpu().numpy() if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sent_fingerprint(self) -> int:
        """Actor: of the last weights that were sent."""
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_bucket(self, index: int, flat: np.ndarray) -> None:
        """Rollout: copy a bucket into the generator's parameters."""
        self._take(torch.from_numpy(flat if flat.flags.writeable else flat.copy()), index)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_fingerprint(self, version: int) -> int:
        """Rollout: of the parameters as they are; from now on they are those of `version`."""
        self.rollout.policy_version = version
        return fingerprint_of(self.generator, self._layout)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weight_group(self) -> tuple[str, int]:
        """Actor: where the broadcast group meets."""
        self._store, address, port = open_store()
        return address, port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def join_weight_group(self, address: str, port: int, size: int) -> None:
        """Both: rank 0 of the actor is rank 0 of the group, the rollout's ranks follow."""
        if self.is_actor and self.rank > 0:
            return
        place = 0 if self.is_actor else self.rank + 1
        self._group = BroadcastGroup(address, port, place, size, self.device, self.config.nccl_timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self) -> int:
        """Actor: broadcast all buckets; returns their fingerprint."""
        for flat in self._buckets():
            if self.rank == 0:
                self._group.send(flat)
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int) -> int:
        """Rollout: take what `send_weights` broadcasts; returns the fingerprint of the parameters."""
        for index, bucket in enumerate(self._layout):
            self._take(self._group.receive(sum(entry.num_bytes for entry in bucket)), index)
        self.rollout.policy_version = version
        return fingerprint_of(self.generator, self._layout)

    def _buckets(self) -> Generator[Tensor]:
        """The actor's buckets, their fingerprint summed up in passing."""
        self._sent = 0
        for flat in pack_buckets(self.actor.weights(), self._layout):
            self._sent += fingerprint(flat)
            yield flat

    def _take(self, flat: Tensor, index: int) -> None:
        self.rollout.update_weights(unpack_bucket(flat, self._layout[index]))
