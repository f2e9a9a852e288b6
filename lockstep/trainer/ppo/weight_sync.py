"""Sends the actor's weights to a rollout that runs in separate processes."""

from collections import deque
from typing import Any

from lockstep.single_controller import FutureList, WorkerGroup
from lockstep.utils.audit import AuditError

IN_FLIGHT = 2
"""Buckets in flight through the object store."""


class WeightSync:
    """actor, rollout: worker groups. backend: naive (object store) or nccl (broadcast; gloo on CPU)."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, backend: str) -> None:
        self.actor: Any = actor
        self.rollout: Any = rollout
        self.layout = self.actor.weight_layout()[0]
        self.broadcasts = backend == "nccl"
        self.rollout.expect_weights(self.layout)
        if self.broadcasts:
            address, port = self.actor.open_weight_group()
            size = self.rollout.world_size + 1
            joined = [group.join_weight_group(address, port, size) for group in (self.actor, self.rollout)]
            FutureList([future for futures in joined for future in futures]).get()

    def run(self, version: int) -> None:
        """Copy the weights and verify their fingerprint; the rollout then tags its samples with `version`."""
        if self.broadcasts:
            sent, loaded = self.actor.send_weights(), self.rollout.receive_weights(version)
            fingerprint, *_ = outputs = FutureList([*sent, *loaded]).get()  # raises the first failure of either side
            received = outputs[len(sent) :]
        else:
            fingerprint, received = self._through_store(version)
        wrong = [rank for rank, found in enumerate(received) if found != fingerprint]
        if wrong:
            raise AuditError(
                f"the rollout's weights differ from the actor's after update {version} on {len(wrong)} of {len(received)} ranks "
                f"(first: rank {wrong[0]}); its samples would not come from this policy"
            )

    def _through_store(self, version: int) -> tuple[int, list[int]]:
        loading: deque[Any] = deque()
        for index in range(len(self.layout)):
            bucket = self.actor.weight_bucket(index)
            loading.append(FutureList([*bucket[1:], *self.rollout.load_bucket(index, bucket[0])]))
            if len(loading) > IN_FLIGHT:
                loading.popleft().get()
        for futures in loading:
            futures.get()
        return self.actor.sent_fingerprint()[0], self.rollout.weights_fingerprint(version)
