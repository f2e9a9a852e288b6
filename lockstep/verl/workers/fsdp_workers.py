"""verl.workers.fsdp_workers. There is one worker class for both of verl's rollout modes."""

from lockstep.verl._names import exports
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker as ActorRolloutRefWorker
from lockstep.workers.critic import CriticWorker as CriticWorker
from lockstep.workers.reward_model import RewardModelWorker as RewardModelWorker

AsyncActorRolloutRefWorker = ActorRolloutRefWorker

__getattr__ = exports(__name__)
