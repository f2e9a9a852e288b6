"""Reward managers by name; `load_reward_manager` builds the one set in `reward_model.reward_manager`."""

import inspect
from functools import partial
from typing import Any

from lockstep.config.ppo import PPOConfig
from lockstep.rewards import sandbox
from lockstep.rewards.custom import ARGUMENTS, BATCH_ARGUMENTS, get_custom_reward_fn
from lockstep.rewards.default import check_scorer_options, default_compute_score, default_compute_scores
from lockstep.rewards.managers.batch import BatchRewardManager
from lockstep.rewards.managers.dapo import DapoRewardManager, OverlongBuffer
from lockstep.rewards.managers.functions import FunctionsRewardManager
from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager, RewardFn, RewardResult
from lockstep.rewards.managers.prime import PrimeRewardManager

__all__ = [
    "REWARD_MANAGERS",
    "BatchRewardManager",
    "DapoRewardManager",
    "FunctionsRewardManager",
    "NaiveRewardManager",
    "OverlongBuffer",
    "PrimeRewardManager",
    "RewardFn",
    "RewardResult",
    "load_reward_manager",
    "uses_default_function",
]


def load_reward_manager(config: PPOConfig, tokenizer: Any, num_examine: int, in_training: bool = False) -> RewardFn:
    """Build the manager of `reward_model.reward_manager` with the custom or the default reward function.

    in_training: the default function gives partial credit, see `lockstep.rewards.default.FORMAT_SCORE`.

    Your own manager, given as `module:Class`, gets the same arguments: `tokenizer`, `num_examine`, `compute_score`,
    `reward_fn_key` and those of `reward_model.reward_kwargs`, and `timeout_s` and `max_resp_len` if it accepts them.
    """
    name, reward_kwargs = config.reward_model.reward_manager, config.reward_model.reward_kwargs
    manager = REWARD_MANAGERS.get(name)
    score_arguments = getattr(manager, "score_arguments", ARGUMENTS)
    compute_score = get_custom_reward_fn(config.custom_reward_function, score_arguments)
    sandbox.configure(config.reward_model.sandbox)
    if compute_score is None:
        sandbox.announce()
        options = config.custom_reward_function.reward_kwargs
        check_scorer_options(options)
        default = default_compute_scores if score_arguments == BATCH_ARGUMENTS else default_compute_score
        if in_training:
            options = {"in_training": True, **options}
        compute_score = partial(default, **options) if options else default
    signature = inspect.signature(manager)
    settings = {"timeout_s": config.reward_model.timeout_s, "max_resp_len": config.data.max_response_length}
    arguments = {
        "tokenizer": tokenizer,
        "num_examine": num_examine,
        "compute_score": compute_score,
        "reward_fn_key": config.data.reward_fn_key,
        **{key: value for key, value in settings.items() if key in signature.parameters},
        **reward_kwargs,
    }
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"reward_model.reward_manager={name} does not accept reward_model.reward_kwargs={reward_kwargs}: {error}"
        ) from error
    return manager(**arguments)


def uses_default_function(reward_fn: RewardFn) -> bool:
    """Whether it is a built-in manager that scores by `data_source`."""
    if not isinstance(reward_fn, NaiveRewardManager):
        return False
    function = reward_fn.compute_score
    return (function.func if isinstance(function, partial) else function) in (
        default_compute_score,
        default_compute_scores,
    )
