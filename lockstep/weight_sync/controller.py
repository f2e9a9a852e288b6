"""The controller's side of a weight update: send the actor's weights to the rollout, then prove that they arrived."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal

from lockstep.protocol import DataProto
from lockstep.single_controller import FutureList, WorkerGroup
from lockstep.utils.audit import AuditError, Audits
from lockstep.weight_sync.proof import CANARY_METRIC, Fingerprints, canary_gap, check_fingerprints, measured_bound

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Buckets in flight through the object store."""
IF_STALE = "the tensors that arrived are not those it computes with"

Transport = Literal["naive", "nccl", "in_process", "none"]
"""naive: object store; nccl: broadcast (gloo on CPU); in_process: actor and rollout are the same workers; none: nothing is trained
and the rollout's weights cannot be updated, so the canary alone proves that they are the actor's."""


class WeightSync:
    """actor, rollout: worker groups, the same one if transport is in_process.

    bound: of the canary's gap, see `canary_bound`; after the first update as measured there.
    audits: what becomes of a proof that fails, and whether there is one (`trainer.audit.weights`); by default it is an AuditError.
    if_stale: the likely cause of a larger gap, for the message.
    """

    def __init__(
        self,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        transport: Transport,
        bound: float,
        audits: Audits | None = None,
        if_stale: str = IF_STALE,
    ) -> None:
        self.actor: Any = actor
        self.rollout: Any = rollout
        self.bound = bound
        self._audits = audits or Audits({})
        self._if_stale = if_stale
        self._is_measured = False
        self.layout = self.actor.weight_layout()[0]
        self.num_bytes = sum(entry.num_bytes for bucket in self.layout for entry in bucket)
        self.rollout.expect_weights(self.layout)
        self._send: Callable[[int], tuple[Fingerprints, list[Fingerprints]]] = {
            "naive": self._through_store,
            "nccl": self._by_broadcast,
            "in_process": self._in_process,
            "none": lambda version: ({}, self.rollout.keep_weights(version)),
        }[transport]
        self._has_group = transport == "nccl"
        if self._has_group:
            self._join()

    def _join(self) -> None:
        """The broadcast group of actor and rollout."""
        address, port = self.actor.open_weight_group()
        size = self.rollout.world_size + 1
        joined = [group.join_weight_group(address, port, size) for group in (self.actor, self.rollout)]
        FutureList([future for futures in joined for future in futures]).get()

    def reconnect(self) -> None:
        """The rollout's processes are new."""
        self.rollout.expect_weights(self.layout)
        if self._has_group:
            self._join()

    def run(self, version: int) -> dict[str, float]:
        """Update the rollout, whose samples then carry `version`, and prove that it holds the actor's weights."""
        start = time.perf_counter()
        fingerprints = self._send(version)
        sent = time.perf_counter()
        metrics = {"weight_sync/send_s": sent - start, "weight_sync/gb": self.num_bytes / 1e9}
        if not self._audits.checks("weights"):
            return metrics
        try:
            check_fingerprints(*fingerprints, version)
        except AuditError as error:
            self._audits.found("weights", str(error))
        gap = self._canary_gap()
        if not gap <= self.bound:
            self._audits.found("weights", self._why_stale(version, gap))
        elif not self._is_measured:
            self._is_measured = True
            self.bound = measured_bound(self.bound, gap)
            self._list_unread()
        return metrics | {CANARY_METRIC: gap, "weight_sync/canary_s": time.perf_counter() - sent}

    def _why_stale(self, version: int, gap: float) -> str:
        """The message about a canary's gap; empties the prefix cache, which may be the cause."""
        self.rollout.drop_cached_prefixes()
        cause = self._if_stale
        if self._canary_gap() <= self.bound:
            cause = "its prefix cache holds keys and values of earlier weights"
        return (
            f"after update {version} the rollout's log-probs of the canary text differ from the trainer's by {gap:.4g} (bound "
            f"{self.bound:g}): {cause}; its samples would not come from this policy"
        )

    def _list_unread(self) -> None:
        """Log what the fingerprints do not prove."""
        unread = {name: reason for rank in self.rollout.unread_weights() for name, reason in rank.items()}
        if unread:
            num_tensors = sum(map(len, self.layout))
            reasons = Counter(unread.values()).most_common()
            logger.warning(
                "%d of %d tensors of the rollout cannot be compared bit by bit with the actor's (%s): %s. They are verified only "
                "by the checksum of the received data and by the canary, within %.2g",
                len(unread),
                num_tensors,
                "; ".join(f"{reason}: {count}" for reason, count in reasons),
                ", ".join(sorted(unread)),
                self.bound,
            )

    def _canary_gap(self) -> float:
        rows = DataProto.concat(self.rollout.generate_canary())
        log_probs = self.actor.canary_log_probs(rows)[0]
        return canary_gap(rows.tensors["rollout_log_probs"], log_probs, rows.tensors["response_mask"])

    def _through_store(self, version: int) -> tuple[Fingerprints, list[Fingerprints]]:
        loading: deque[Any] = deque()
        for index in range(len(self.layout)):
            bucket = self.actor.weight_bucket(index)
            loading.append(FutureList([*bucket[1:], *self.rollout.load_bucket(index, bucket[0])]))
            if len(loading) > IN_FLIGHT:
                loading.popleft().get()
        for futures in loading:
            futures.get()
        return self.actor.sent_fingerprints()[0], self.rollout.finish_update(version)

    def _by_broadcast(self, version: int) -> tuple[Fingerprints, list[Fingerprints]]:
        sent = self.actor.send_weights()
        loaded = self.rollout.receive_weights(version)
        outputs = FutureList([*sent, *loaded]).get()  # raises the first failure of either side
        return outputs[0], outputs[len(sent) :]

    def _in_process(self, version: int) -> tuple[Fingerprints, list[Fingerprints]]:
        pairs = self.rollout.hand_over_weights(version)
        return pairs[0][0], [received for _, received in pairs]
