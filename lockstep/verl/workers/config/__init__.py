"""verl.workers.config: sections that a program may construct itself, with every default filled in.

They have attributes and read like mappings; fields that verl lets a program assign may be assigned.
"""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.workers.config.actor": (
            "ActorConfig",
            "FSDPActorConfig",
            "McoreActorConfig",
            "PolicyLossConfig",
        ),
        "lockstep.verl.workers.config.critic": ("CriticConfig", "FSDPCriticConfig", "McoreCriticConfig"),
        "lockstep.verl.workers.config.engine": ("EngineConfig", "FSDPEngineConfig", "McoreEngineConfig"),
        "lockstep.verl.workers.config.model": ("CheckpointConfig", "HFModelConfig"),
        "lockstep.verl.workers.config.optimizer": ("FSDPOptimizerConfig", "McoreOptimizerConfig", "OptimizerConfig"),
        "lockstep.verl.workers.config.rollout": (
            "AgentLoopConfig",
            "CheckpointEngineConfig",
            "MultiTurnConfig",
            "RolloutConfig",
            "SamplingConfig",
            "ServerConfig",
        ),
    },
)
