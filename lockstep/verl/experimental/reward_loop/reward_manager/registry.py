"""verl.experimental.reward_loop.reward_manager.registry: a program's managers, by the name that the config selects."""

import functools
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from lockstep.rewards.managers import REWARD_MANAGERS
from lockstep.verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from lockstep.verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

_classes: dict[str, type] = {"naive": NaiveRewardManager, "rate_limited": RateLimitedRewardManager}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: `reward_model.reward_manager=name` selects the manager; `reward_kwargs` are its `config.reward_model`."""

    def add(cls: type) -> type:
        if _classes.get(name, cls) is not cls:
            raise ValueError(f"reward manager {name!r} is already registered: {_classes[name]!r}")
        _classes[name] = cls
        if name not in REWARD_MANAGERS:
            REWARD_MANAGERS.register(name)(functools.partial(_construct, cls))
        return cls

    return add


def get_reward_manager_cls(name: str) -> type:
    if name not in _classes:
        raise ValueError(f"no reward manager {name!r}; known: {', '.join(sorted(_classes)) or 'none'}")
    return _classes[name]


def _construct(
    cls: type, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str, **reward_kwargs: Any
) -> Any:
    config = OmegaConf.create({"reward_model": reward_kwargs})
    return cls(config=config, tokenizer=tokenizer, compute_score=compute_score)
