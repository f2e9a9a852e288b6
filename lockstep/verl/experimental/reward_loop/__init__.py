"""verl.experimental.reward_loop: reward managers that score one row at a time in an event loop."""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.experimental.reward_loop.reward_loop": ("migrate_legacy_reward_impl",),
        "lockstep.verl.experimental.reward_loop.reward_manager.base": ("RewardManagerBase",),
        "lockstep.verl.experimental.reward_loop.reward_manager.limited": ("RateLimitedRewardManager",),
    },
)
