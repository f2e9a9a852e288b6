"""verl.workers.megatron_workers. The worker classes are those of FSDP; `strategy` of a role selects its training engine."""

from lockstep.verl._names import exports
from lockstep.verl.workers.fsdp_workers import (
    ActorRolloutRefWorker as ActorRolloutRefWorker,
    AsyncActorRolloutRefWorker as AsyncActorRolloutRefWorker,
    CriticWorker as CriticWorker,
    RewardModelWorker as RewardModelWorker,
)

__getattr__ = exports(__name__)
