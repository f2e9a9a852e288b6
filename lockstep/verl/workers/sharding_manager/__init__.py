"""verl.workers.sharding_manager"""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {"lockstep.verl.workers.sharding_manager.fsdp_ulysses": ("BaseShardingManager", "FSDPUlyssesShardingManager")},
)
