"""Names of plug-ins that a config can select, so that it is checked before torch is imported.

Registering another one adds its name; see `Registry`.
"""

from lockstep.config.policy_loss import BUILT_IN_LOSSES

POLICY_LOSSES = set(BUILT_IN_LOSSES)
TRAIN_ENGINES = {"fsdp", "fsdp2"}
REWARD_MANAGERS = {"naive", "batch", "dapo", "functions", "prime", "rate_limited"}
