"""verl.workers.config: sections that a program may construct itself, with every default filled in.

They have attributes and read like mappings; fields that verl lets a program assign may be assigned.
"""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.workers.config.actor": ("ActorConfig", "FSDPActorConfig", "PolicyLossConfig"),
        "lockstep.verl.workers.config.critic": ("CriticConfig", "FSDPCriticConfig"),
        "lockstep.verl.workers.config.engine": ("EngineConfig", "FSDPEngineConfig"),
        "lockstep.verl.workers.config.model": ("CheckpointConfig", "HFModelConfig"),
        "lockstep.verl.workers.config.optimizer": ("FSDPOptimizerConfig", "OptimizerConfig"),
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
