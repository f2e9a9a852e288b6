"""verl.workers.config.optimizer"""

from dataclasses import InitVar, dataclass
from typing import Any

from lockstep.config import model
from lockstep.config.schema import Mismatch, coerce, keys
from lockstep.verl._names import exports
from lockstep.verl.base_config import DictLike, assignable

__getattr__ = exports(__name__)

IMPLEMENTATIONS = ("torch.optim", None)


def take(section: Any, name: str, **older_names: Any) -> None:
    """Set the field `name` from an older name of it, which must not contradict it."""
    for older, value in older_names.items():
        if value is None:
            continue
        if getattr(section, name) not in (value, type(section).__dataclass_fields__[name].default):
            raise ValueError(f"{older}={value} and {name}={getattr(section, name)}: set only one of them")
        object.__setattr__(section, name, value)
        object.__setattr__(section, older, value)


@assignable("clip_grad", "total_training_steps", "lr_warmup_steps")
@dataclass(frozen=True)
class FSDPOptimizerConfig(DictLike, model.FSDPOptimizerConfig):
    """Checks its values, the name of the schedule among them.

    optimizer_impl: the module of the optimizer's class; AdamW of `torch.optim` is the only one.
    """

    warmup_style: InitVar[str | None] = None
    optimizer_impl: InitVar[str | None] = "torch.optim"
    override_optimizer_config: InitVar[dict[str, Any] | None] = None

    def __post_init__(
        self, warmup_style: str | None, optimizer_impl: str | None, override_optimizer_config: dict[str, Any] | None
    ) -> None:
        take(self, "lr_scheduler_type", warmup_style=warmup_style)
        if optimizer_impl not in IMPLEMENTATIONS:
            raise ValueError(f"optim.optimizer_impl={optimizer_impl}: must be torch.optim; AdamW is the only optimizer")
        if override_optimizer_config:
            raise ValueError(
                f"optim.override_optimizer_config={override_optimizer_config}: set lr, betas and weight_decay instead"
            )
        if self.min_lr_ratio is None:
            object.__setattr__(self, "min_lr_ratio", 0.0)
        for key in keys(model.FSDPOptimizerConfig).values():
            value = getattr(self, key.field)
            try:
                object.__setattr__(self, key.field, coerce(value, key.annotation))
            except Mismatch as error:
                raise ValueError(f"optim.{key.field}={value}: must be {error}") from None


OptimizerConfig = FSDPOptimizerConfig


@assignable("clip_grad", "total_training_steps", "lr_warmup_steps")
@dataclass(frozen=True)
class McoreOptimizerConfig(FSDPOptimizerConfig):
    """The names of Megatron. optimizer: its `adam` is AdamW. lr_decay_style, lr_decay_steps: the schedule and its length.

    The others must have their default.
    """

    lr_decay_style: InitVar[str | None] = None
    lr_decay_steps: InitVar[int | None] = None
    lr_warmup_init: InitVar[float] = 0.0
    weight_decay_incr_style: InitVar[str] = "constant"
    lr_wsd_decay_style: InitVar[str] = "exponential"
    lr_wsd_decay_steps: InitVar[int | None] = None
    use_checkpoint_opt_param_scheduler: InitVar[bool] = False

    def __post_init__(
        self,
        warmup_style: str | None,
        optimizer_impl: str | None,
        override_optimizer_config: dict[str, Any] | None,
        lr_decay_style: str | None,
        lr_decay_steps: int | None,
        *fixed: Any,
    ) -> None:
        for name, value in zip(MCORE_DEFAULTS, fixed, strict=True):
            if value != MCORE_DEFAULTS[name]:
                raise ValueError(f"optim.{name}={value}: must be {MCORE_DEFAULTS[name]}")
        if str(self.optimizer) in ("adam", "adamw"):
            object.__setattr__(self, "optimizer", "AdamW")
        take(self, "lr_scheduler_type", lr_decay_style=lr_decay_style)
        take(self, "total_training_steps", lr_decay_steps=lr_decay_steps)
        super().__post_init__(warmup_style, optimizer_impl, override_optimizer_config)


MCORE_DEFAULTS = {
    "lr_warmup_init": 0.0,
    "weight_decay_incr_style": "constant",
    "lr_wsd_decay_style": "exponential",
    "lr_wsd_decay_steps": None,
    "use_checkpoint_opt_param_scheduler": False,
}
"""Arguments of `McoreOptimizerConfig` that have one value."""
