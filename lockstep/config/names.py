"""Names of plug-ins that a config can select, so that it is checked before torch is imported.

Registering another one adds its name; see `Registry`.
"""

TRAIN_ENGINES = {"fsdp", "fsdp2"}
