"""Both ends of a weight update, as methods of the policy's worker."""

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.engines.rollout import ROLLOUT_ENGINES
from lockstep.engines.rollout.rollout_engine import RolloutEngine, rollout_dtype
from lockstep.engines.train import TrainEngine
from lockstep.single_controller import Dispatch, Worker, register
from lockstep.utils.device import MemoryPeaks
from lockstep.utils.fingerprint import fingerprint
from lockstep.weight_sync.broadcast import BroadcastGroup, open_store
from lockstep.weight_sync.buckets import Layout, cast_buckets, layout_of, names_of, pack_bucket, unpack_bucket
from lockstep.weight_sync.proof import Fingerprints, check_fingerprints


class WeightSyncWorker(Worker):
    """Methods of an actor (which has `actor`) and of a rollout (which has `rollout`); a worker can be both.

    has_trained: whether the actor's weights have changed since they were sent last.
    """

    config: ActorRolloutRefConfig
    device: torch.device
    memory: MemoryPeaks
    is_actor: bool
    has_trained: bool = False
    actor: TrainEngine
    rollout: RolloutEngine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_layout(self) -> Layout:
        """Actor: names and shapes of the tensors in each bucket."""
        megabytes = self.config.rollout.checkpoint_engine.update_weights_bucket_megabytes
        self._layout = layout_of(
            self.actor.weight_shapes(merged=self._sends_all), rollout_dtype(self.config, self.device), megabytes << 20
        )
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
        flat = pack_bucket(next(self._stream))
        if index == len(self._layout) - 1:
            self._stream.close()
        return flat.cpu().numpy() if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sent_fingerprints(self) -> Fingerprints:
        """Actor: fingerprints of the weights sent last."""
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_bucket(self, index: int, flat: np.ndarray) -> None:
        """Rollout: load the next bucket."""
        if index == 0:
            self.rollout.begin_update()
        self._load(torch.from_numpy(flat if flat.flags.writeable else flat.copy()), index)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_update(self, version: int) -> Fingerprints:
        """Rollout: after the last bucket, whose weights are those of `version`; returns the rollout's fingerprints."""
        self.rollout.finish_update(version)
        return self.rollout.fingerprints(names_of(self._layout))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def unread_weights(self) -> dict[str, str]:
        """Rollout, after an update: tensors that its fingerprints do not prove, and why."""
        return self.rollout.unread_weights(names_of(self._layout))

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
    def send_weights(self) -> Fingerprints:
        """Actor: broadcast all buckets; returns their fingerprints."""
        for tensors in self._buckets():
            if self.rank == 0:
                self._group.send(pack_bucket(tensors))
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int) -> Fingerprints:
        """Rollout: receive what `send_weights` broadcasts; returns the rollout's fingerprints."""
        self.rollout.begin_update()
        for index, bucket in enumerate(self._layout):
            self._load(self._group.receive(sum(entry.num_bytes for entry in bucket)), index)
        return self.finish_update(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hand_over_weights(self, version: int) -> tuple[Fingerprints, Fingerprints]:
        """Actor and rollout in one process: load all buckets; returns the fingerprints of both."""
        self.rollout.begin_update()
        with self.memory.phase("update_weights"):
            for tensors in self._buckets():
                self.rollout.update_weights(iter(tensors))
        return self._sent, self.finish_update(version)

    def restore_weights(self) -> None:
        """Actor and rollout in one process: send the weights again to an engine that dropped them when it went to sleep."""
        if self.rollout.has_weights:
            return
        if self.has_trained:
            raise RuntimeError("the actor has trained since its weights were last sent: update the rollout first")
        version = self.rollout.policy_version
        sent, received = self.hand_over_weights(version)
        check_fingerprints(sent, [received], version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def takes_weights(self) -> bool:
        """Rollout: whether its weights can be updated."""
        return self.rollout.takes_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_weights(self, version: int) -> Fingerprints:
        """Rollout: its weights, which were not updated, count as those of `version`; returns no fingerprints."""
        self.rollout.policy_version = version
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop_cached_prefixes(self) -> None:
        """Rollout: forget the KV cache of earlier prompts."""
        self.rollout.drop_cached_prefixes()

    def _buckets(self) -> Generator[list[tuple[str, Tensor]]]:
        """The actor's buckets; records their fingerprints."""
        self._sent: Fingerprints = {}
        self.has_trained = False
        weights = self.actor.merged_weights() if self._sends_all else self.actor.weights(trained=True)
        for tensors in cast_buckets(weights, self._layout):
            self._sent |= {name: fingerprint(tensor) for name, tensor in tensors}
            yield tensors

    @property
    def _sends_all(self) -> bool:
        """Whether frozen weights are sent too, with adapters merged into them."""
        return not ROLLOUT_ENGINES.info(self.config.rollout.name).takes_adapters

    def _load(self, flat: Tensor, index: int) -> None:
        self.rollout.update_weights(unpack_bucket(flat, self._layout[index]))
