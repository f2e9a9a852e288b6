"""verl.workers.engine_workers: one worker class for verl's engines and rollout modes."""

from lockstep.verl._names import exports
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker as ActorRolloutRefWorker

__getattr__ = exports(__name__)
