"""An actor, an engine with a copy of its weights, and the controller's side of their updates, in this process."""

from typing import Any

import torch

from lockstep.engines.rollout import RolloutEngine
from lockstep.single_controller import Future, FutureList
from lockstep.single_controller.local import LocalFuture
from lockstep.weight_sync import CANARY_METRIC, WeightSync, canary_bound
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker


class OneWorker:
    """A worker as a group of one; asynchronous calls run when their result is requested."""

    world_size = 1

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            output = getattr(self.worker, name)(*(arg.get() if isinstance(arg, Future) else arg for arg in args))
            return FutureList([LocalFuture(output)]) if name in ("weight_bucket", "load_bucket") else [output]

        return call


class Copy:
    """actor, rollout: the same worker, or one each."""

    def __init__(
        self, actor: ActorRolloutRefWorker, rollout: ActorRolloutRefWorker, dtype: torch.dtype = torch.float32
    ) -> None:
        self.actor, self.rollout = actor, rollout
        groups: list[Any] = [OneWorker(actor), OneWorker(rollout)]
        self.sync = WeightSync(*groups, "in_process" if actor is rollout else "naive", canary_bound(dtype))
        self.version = 0

    @property
    def engine(self) -> RolloutEngine:
        return self.rollout.rollout

    def train(self) -> None:
        """Change every parameter of the actor."""
        with torch.no_grad():
            for parameter in self.actor.actor.model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        self.actor.actor._refresh()
        self.actor.has_trained = True

    def update(self) -> float:
        """Send the actor's weights; returns the canary's distance."""
        self.version += 1
        return self.sync.run(self.version)[CANARY_METRIC]
