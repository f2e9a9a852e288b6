"""verl.workers.config.actor"""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from lockstep.config import actor_rollout_ref, policy_loss
from lockstep.config.train_engines import engine_settings
from lockstep.verl._config import resolve_by_hand
from lockstep.verl._names import exports
from lockstep.verl.base_config import DictLike, adapt_sections, assignable
from lockstep.verl.workers.config.optimizer import take

__getattr__ = exports(__name__)

BATCH_SIZES = (
    "ppo_mini_batch_size",
    "ppo_micro_batch_size",
    "ppo_micro_batch_size_per_gpu",
    "ppo_infer_micro_batch_size_per_gpu",
)


def check_batch_sizes(section: Any, name: str, n_gpus: int, train_batch_size: int) -> None:
    """ValueError if the batch sizes of a section do not fit together; not checked with dynamic batch sizes.

    `ppo_micro_batch_size`, the older key, counts sequences on all GPUs.
    """
    if section.use_dynamic_bsz:
        return
    mini, micro = section.ppo_mini_batch_size, section.ppo_micro_batch_size
    if train_batch_size < mini:
        raise ValueError(f"data.train_batch_size={train_batch_size} must be at least {name}.ppo_mini_batch_size={mini}")
    if micro is None:
        return
    if mini % micro:
        raise ValueError(f"{name}.ppo_mini_batch_size={mini} must be divisible by ppo_micro_batch_size={micro}")
    ranks = section.ulysses_sequence_parallel_size
    if micro * ranks < n_gpus:
        raise ValueError(
            f"{name}.ppo_micro_batch_size={micro} * ulysses_sequence_parallel_size={ranks} must be >= n_gpus={n_gpus}"
        )


@assignable()
@dataclass(frozen=True)
class PolicyLossConfig(DictLike, policy_loss.PolicyLossConfig):
    def __post_init__(self) -> None:
        adapt_sections(self)


@assignable(*BATCH_SIZES)
@dataclass(frozen=True)
class ActorConfig(DictLike, actor_rollout_ref.ActorConfig):
    """The section complete: defaults that follow other keys have their values."""

    rollout_n: int = field(default=1, metadata={"internal": True})
    global_batch_info: dict[str, Any] = field(default_factory=dict, metadata={"internal": True})
    ppo_micro_batch_size: InitVar[int | None] = None

    def __post_init__(self, ppo_micro_batch_size: int | None) -> None:
        take(self, "ppo_micro_batch_size_per_gpu", ppo_micro_batch_size=ppo_micro_batch_size)
        resolve_by_hand(self, "actor_rollout_ref.actor")
        adapt_sections(self)

    @property
    def engine(self) -> Any:
        """verl's newer name of the settings of the engine."""
        return engine_settings(self)

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Mapping[str, Any] | None = None) -> None:
        """ValueError if the section does not fit the number of GPUs, the batch of a step, or the model."""
        check_batch_sizes(self, "actor_rollout_ref.actor", n_gpus, train_batch_size)
        if self.ulysses_sequence_parallel_size > 1 and not (model_config or {}).get("use_remove_padding", True):
            raise ValueError(
                f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={self.ulysses_sequence_parallel_size}: "
                "you must enable `use_remove_padding` of actor_rollout_ref.model"
            )


FSDPActorConfig = ActorConfig


@assignable(*BATCH_SIZES)
@dataclass(frozen=True)
class McoreActorConfig(ActorConfig):
    strategy: str = "megatron"
    load_weight: bool = field(default=True, metadata={"internal": True})
