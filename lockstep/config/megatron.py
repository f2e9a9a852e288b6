"""`megatron`: settings of the Megatron engine, beside the `fsdp_config` of each role; keys as in verl's section."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II

from lockstep.config.bounds import NonNegativeInt, PositiveInt
from lockstep.config.model import TrainEngineConfig

_ACTOR = "actor_rollout_ref.actor.megatron"


@dataclass(frozen=True)
class McoreEngineConfig(TrainEngineConfig):
    grad_offload: bool = False
    """Free the memory of gradients between updates (no effect on CPU)."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that split each weight matrix."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages of consecutive layers, each on other ranks."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Must be null or 1: a stage is computed in one piece."""
    context_parallel_size: PositiveInt = 1
    """Must be 1: splitting sequences needs the attention of TransformerEngine, which is not used."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that split each expert's matrices; null is `tensor_model_parallel_size`."""
    sequence_parallel: bool = True
    """Split norms and the residual stream over the tensor-parallel ranks too (no effect with one)."""
    use_distributed_optimizer: bool = True
    """Shard master weights and optimizer state over the data-parallel ranks."""
    override_ddp_config: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's DistributedDataParallelConfig."""
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig, such as recompute_granularity, recompute_method and recompute_num_layers."""

    @property
    def transformer_overrides(self) -> dict[str, Any]:
        """The entries of `override_transformer_config` that are set and have an effect: verl's files have null for most."""
        entries = self.override_transformer_config.items()
        return {name: value for name, value in entries if value is not None and name != "attention_backend"}

    @property
    def ranks_per_row(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def ranks_per_sequence(self) -> int:
        return self.context_parallel_size


@dataclass(frozen=True)
class FollowingMcoreEngineConfig(McoreEngineConfig):
    """Of roles besides the actor: the layout is the actor's unless it is set, because roles in one pool share it."""

    seed: NonNegativeInt = II(f"{_ACTOR}.seed")
    """Seed of new parameters (the value head) and of stochastic rounding."""
    tensor_model_parallel_size: PositiveInt = II(f"{_ACTOR}.tensor_model_parallel_size")
    """Ranks that split each weight matrix."""
    pipeline_model_parallel_size: PositiveInt = II(f"{_ACTOR}.pipeline_model_parallel_size")
    """Stages of consecutive layers, each on other ranks."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = II(f"{_ACTOR}.virtual_pipeline_model_parallel_size")
    """Must be null or 1: a stage is computed in one piece."""
    context_parallel_size: PositiveInt = II(f"{_ACTOR}.context_parallel_size")
    """Must be 1: splitting sequences needs the attention of TransformerEngine, which is not used."""
    expert_model_parallel_size: PositiveInt = II(f"{_ACTOR}.expert_model_parallel_size")
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt | None = II(f"{_ACTOR}.expert_tensor_parallel_size")
    """Ranks that split each expert's matrices; null is `tensor_model_parallel_size`."""
    sequence_parallel: bool = II(f"{_ACTOR}.sequence_parallel")
    """Split norms and the residual stream over the tensor-parallel ranks too (no effect with one)."""
    override_transformer_config: dict[str, Any] = II(f"{_ACTOR}.override_transformer_config")
    """Fields of Megatron's TransformerConfig, such as recompute_granularity, recompute_method and recompute_num_layers."""


@dataclass(frozen=True)
class RefMcoreEngineConfig(FollowingMcoreEngineConfig):
    param_offload: bool = II(f"{_ACTOR}.param_offload")
    """Keep parameters in host memory between the phases that use them (no effect on CPU)."""
