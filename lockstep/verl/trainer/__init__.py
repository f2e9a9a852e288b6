"""verl.trainer; importing it adds the config `ppo_trainer` to Hydra."""

from lockstep.verl._config import register_ppo_trainer
from lockstep.verl._names import exports

register_ppo_trainer()

__getattr__ = exports(__name__)
