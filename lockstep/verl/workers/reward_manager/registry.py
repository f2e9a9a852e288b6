"""verl.workers.reward_manager.registry"""

from collections.abc import Callable
from typing import Any

from lockstep.rewards.managers import REWARD_MANAGERS
from lockstep.verl._registry import RegistryView

REWARD_MANAGER_REGISTRY = RegistryView(REWARD_MANAGERS)

register: Callable[[str], Callable[[Any], Any]] = REWARD_MANAGERS.register
get_reward_manager_cls: Callable[[str], Any] = REWARD_MANAGERS.get
