"""Load the reward function of `custom_reward_function` from a file or package and check its signature."""

import functools
from collections.abc import Callable
from typing import Any

from lockstep.config.reward import CustomRewardFunctionConfig
from lockstep.registry import check_signature, load_plugin

ComputeScore = Callable[..., Any]
"""`compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)`: a number or a dict with
`score`; may be a coroutine function."""

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Arguments of a function that scores a whole batch and returns a list; see the batch manager."""


def get_custom_reward_fn(
    config: CustomRewardFunctionConfig,
    arguments: tuple[str, ...] = ARGUMENTS,
    key: str = "custom_reward_function.path",
    kwargs_key: str = "custom_reward_function.reward_kwargs",
) -> ComputeScore | None:
    """The user's function with its `reward_kwargs` bound; None if the path is null. key, kwargs_key: for messages."""
    if config.path is None:
        return None
    function = load_plugin(key, config.path, config.name)
    clash = set(config.reward_kwargs) & set(arguments)
    if clash:
        raise ValueError(f"{kwargs_key} may not set {', '.join(sorted(clash))}: they come from the rows")
    try:
        check_signature(function, (*arguments, *config.reward_kwargs))
    except ValueError as error:
        raise ValueError(f"{key}={config.path}: {error}; set others in {kwargs_key}") from error
    return functools.partial(function, **config.reward_kwargs) if config.reward_kwargs else function
