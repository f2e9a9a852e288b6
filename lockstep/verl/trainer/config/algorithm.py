"""verl.trainer.config.algorithm"""

from lockstep.verl.trainer.config import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgoConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]
