"""verl.experimental.reward_loop.reward_manager"""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.experimental.reward_loop.reward_manager.base": ("RewardManagerBase",),
        "lockstep.verl.experimental.reward_loop.reward_manager.limited": ("RateLimitedRewardManager",),
        "lockstep.verl.experimental.reward_loop.reward_manager.naive": ("NaiveRewardManager",),
        "lockstep.verl.experimental.reward_loop.reward_manager.registry": ("get_reward_manager_cls", "register"),
    },
)
