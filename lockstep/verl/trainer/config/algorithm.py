"""verl.trainer.config.algorithm"""

from lockstep.verl.trainer.config import (
    AlgoConfig as AlgoConfig,
    FilterGroupsConfig as FilterGroupsConfig,
    KLControlConfig as KLControlConfig,
    RolloutCorrectionConfig as RolloutCorrectionConfig,
)
