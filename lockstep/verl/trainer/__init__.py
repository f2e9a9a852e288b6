"""verl.trainer; importing it adds the configs `ppo_trainer` and `sft_trainer` to Hydra."""

from lockstep.verl._config import register_configs
from lockstep.verl._names import exports

register_configs()

__getattr__ = exports(__name__)
