"""verl.workers.config.model"""

from dataclasses import dataclass

from lockstep.config import model
from lockstep.verl._names import exports
from lockstep.verl.base_config import DictLike, assignable

__getattr__ = exports(__name__)


@assignable("path", "tokenizer_path", "target_modules", "override_config")
@dataclass(frozen=True)
class HFModelConfig(DictLike, model.HFModelConfig): ...


@assignable()
@dataclass(frozen=True)
class CheckpointConfig(DictLike, model.CheckpointConfig): ...
