"""Both ends of a weight transfer between processes, as methods of the policy's worker."""

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.engines.rollout.base import RolloutEngine
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.models.loading import resolve_dtype
from lockstep.single_controller import Dispatch, Worker, register
from lockstep.utils.fingerprint import fingerprint
from lockstep.workers.weight_transfer import (
    BroadcastGroup,
    Layout,
    fingerprint_of,
    layout_of,
    open_store,
    pack_buckets,
    unpack_bucket,
)


class WeightHandOver(Worker):
    """Methods of role actor (which has `actor`) and of role rollout (which has `rollout` and `generator`)."""

    config: ActorRolloutRefConfig
    device: torch.device
    is_actor: bool
    actor: FsdpEngine
    rollout: RolloutEngine
    generator: PreTrainedModel

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_layout(self) -> Layout:
        """Actor: names and shapes of the tensors in each bucket. A frozen base is not sent: the rollout has loaded the same."""
        megabytes = self.config.rollout.checkpoint_engine.update_weights_bucket_megabytes
        dtype = resolve_dtype(self.config.actor.fsdp_config.dtype, self.device)
        model = self.actor.model
        trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
        shapes = [(model.hf_name(name), tuple(parameter.shape)) for name, parameter in trained]
        self._layout = layout_of(shapes, dtype, megabytes << 20)
        return self._layout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def expect_weights(self, layout: Layout) -> None:
        """Rollout: set the layout of the buckets to receive."""
        self._layout = layout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def weight_bucket(self, index: int) -> np.ndarray | None:
        """Actor: the next bucket, on rank 0; all ranks gather it."""
        if index == 0:
            self._stream = self._buckets()
        flat = next(self._stream)
        if index == len(self._layout) - 1:
            self._stream.close()
        return flat.cpu().numpy() if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sent_fingerprint(self) -> int:
        """Actor: fingerprint of the weights sent last."""
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_bucket(self, index: int, flat: np.ndarray) -> None:
        """Rollout: copy a bucket into the generator's parameters."""
        self._take(torch.from_numpy(flat if flat.flags.writeable else flat.copy()), index)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_fingerprint(self, version: int) -> int:
        """Rollout: fingerprint of the current parameters, which become those of `version`."""
        self.rollout.policy_version = version
        return fingerprint_of(self.generator, self._layout)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weight_group(self) -> tuple[str, int]:
        """Actor: address and port of the broadcast group's store."""
        self._store, address, port = open_store()
        return address, port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def join_weight_group(self, address: str, port: int, size: int) -> None:
        """Both: the actor's rank 0 is rank 0 of the group, the rollout's ranks follow."""
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
        """Rollout: receive what `send_weights` broadcasts; returns the fingerprint of the parameters."""
        for index, bucket in enumerate(self._layout):
            self._take(self._group.receive(sum(entry.num_bytes for entry in bucket)), index)
        self.rollout.policy_version = version
        return fingerprint_of(self.generator, self._layout)

    def _buckets(self) -> Generator[Tensor]:
        """The actor's buckets; sums up their fingerprint."""
        self._sent = 0
        for flat in pack_buckets(self.actor.weights(trained=True), self._layout):
            self._sent += fingerprint(flat)
            yield flat

    def _take(self, flat: Tensor, index: int) -> None:
        self.rollout.update_weights(unpack_bucket(flat, self._layout[index]))
