"""verl.workers.config.engine"""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any

from lockstep.config import megatron, model
from lockstep.config.model import WrapPolicyConfig
from lockstep.verl._names import exports
from lockstep.verl.base_config import DictLike, adapt_sections, assignable

__getattr__ = exports(__name__)

STRATEGIES = ("fsdp", "fsdp2")


@assignable("ulysses_sequence_parallel_size")
@dataclass(frozen=True)
class FSDPEngineConfig(DictLike, model.FSDPEngineConfig):
    """`fsdp_config`. strategy: both names mean FSDP2. use_orig_params, use_torch_compile, forward_only: have no effect."""

    strategy: InitVar[str] = "fsdp"
    use_orig_params: InitVar[bool] = False
    use_torch_compile: InitVar[bool] = True
    forward_only: InitVar[bool] = False

    def __post_init__(self, strategy: str, *no_effect: Any) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"fsdp_config.strategy={strategy}: must be one of {', '.join(STRATEGIES)}")
        if isinstance(self.wrap_policy, Mapping) and not isinstance(self.wrap_policy, DictLike):
            object.__setattr__(self, "wrap_policy", WrapPolicyConfig(**self.wrap_policy))
        adapt_sections(self)


@assignable("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel")
@dataclass(frozen=True)
class McoreEngineConfig(DictLike, megatron.McoreEngineConfig):
    """`megatron`. strategy: must be megatron. The other arguments that are no fields have no effect; see docs/megatron.md."""

    strategy: InitVar[str] = "megatron"
    use_dist_checkpointing: InitVar[bool] = False
    dist_checkpointing_path: InitVar[str | None] = None
    dist_checkpointing_prefix: InitVar[str] = ""
    override_mcore_model_config: InitVar[dict[str, Any] | None] = None
    use_mbridge: InitVar[bool] = True
    vanilla_mbridge: InitVar[bool] = True
    use_remove_padding: InitVar[bool] = True
    forward_only: InitVar[bool] = False

    def __post_init__(self, strategy: str, *no_effect: Any) -> None:
        if strategy != "megatron":
            raise ValueError(f"megatron.strategy={strategy}: must be megatron")


EngineConfig = FSDPEngineConfig
