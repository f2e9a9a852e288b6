"""verl.utils.reward_score: `default_compute_score`, and one module per scorer."""

from lockstep.verl._names import exports

__getattr__ = exports(__name__, {"lockstep.rewards.default": ("default_compute_score",)})
