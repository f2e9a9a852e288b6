"""verl.trainer; importing it adds the config `ppo_trainer` to Hydra."""

from lockstep.verl._config import register_ppo_trainer

register_ppo_trainer()
