"""verl.workers.config.critic"""

from dataclasses import InitVar, dataclass, field

from lockstep.config import critic
from lockstep.verl._config import resolve_by_hand
from lockstep.verl._names import exports
from lockstep.verl.base_config import DictLike, adapt_sections, assignable
from lockstep.verl.workers.config.actor import BATCH_SIZES, check_batch_sizes
from lockstep.verl.workers.config.optimizer import take

__getattr__ = exports(__name__)


@assignable(*BATCH_SIZES, "forward_micro_batch_size", "forward_micro_batch_size_per_gpu")
@dataclass(frozen=True)
class CriticConfig(DictLike, critic.CriticConfig):
    """The section complete: defaults that follow other keys have their values."""

    rollout_n: int = field(default=1, metadata={"internal": True})
    ppo_micro_batch_size: InitVar[int | None] = None
    forward_micro_batch_size: InitVar[int | None] = None

    def __post_init__(self, ppo_micro_batch_size: int | None, forward_micro_batch_size: int | None) -> None:
        take(self, "ppo_micro_batch_size_per_gpu", ppo_micro_batch_size=ppo_micro_batch_size)
        take(self, "forward_micro_batch_size_per_gpu", forward_micro_batch_size=forward_micro_batch_size)
        resolve_by_hand(self, "critic")
        adapt_sections(self)

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """ValueError if the section does not fit the number of GPUs, the batch of a step, or the model."""
        check_batch_sizes(self, "critic", n_gpus, train_batch_size)
        if self.ulysses_sequence_parallel_size > 1 and not self.model.use_remove_padding:
            raise ValueError(
                "critic.ulysses_sequence_parallel_size: you must enable `use_remove_padding` of critic.model"
            )


FSDPCriticConfig = CriticConfig


@assignable(*BATCH_SIZES, "forward_micro_batch_size", "forward_micro_batch_size_per_gpu")
@dataclass(frozen=True)
class McoreCriticConfig(CriticConfig):
    strategy: str = "megatron"
    load_weight: bool = field(default=True, metadata={"internal": True})
