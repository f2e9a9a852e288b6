"""Reward managers by name; `load_reward_manager` builds the one set in `reward_model.reward_manager`."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.config.ppo import PPOConfig
from lockstep.rewards import sandbox
from lockstep.rewards.custom import ARGUMENTS
from lockstep.rewards.default import check_data_sources, default_compute_score, default_compute_scores
from lockstep.rewards.ensemble import Ensemble
from lockstep.rewards.load import load_compute_score
from lockstep.rewards.managers.batch import BatchRewardManager as BatchRewardManager
from lockstep.rewards.managers.dapo import DapoRewardManager as DapoRewardManager, OverlongBuffer as OverlongBuffer
from lockstep.rewards.managers.functions import FunctionsRewardManager as FunctionsRewardManager
from lockstep.rewards.managers.naive import (
    REWARD_MANAGERS as REWARD_MANAGERS,
    NaiveRewardManager as NaiveRewardManager,
    RewardFn as RewardFn,
    RewardResult as RewardResult,
)
from lockstep.rewards.managers.prime import PrimeRewardManager as PrimeRewardManager
from lockstep.rewards.managers.rate_limited import RateLimitedRewardManager as RateLimitedRewardManager
from lockstep.rewards.rate_limit import has_limits, limits_of, shared_limiter
from lockstep.rewards.sandbox import fusion

if TYPE_CHECKING:
    from lockstep.data.files import FileRow


def load_reward_manager(config: PPOConfig, tokenizer: Any, num_examine: int, in_training: bool = False) -> RewardFn:
    """Build the manager of `reward_model.reward_manager` with the custom or the default reward function.

    in_training: the default function gives partial credit, see `lockstep.rewards.default.FORMAT_SCORE`.

    Your own manager, given as `module:Class`, gets the same arguments: `tokenizer`, `num_examine`, `compute_score`,
    `reward_fn_key` and those of `reward_model.reward_kwargs`, and `timeout_s` and `max_resp_len` if it accepts them.
    """
    name, reward_kwargs = config.reward_model.reward_manager, config.reward_model.reward_kwargs
    manager = REWARD_MANAGERS.get(name)
    sandbox.configure(config.reward_model.sandbox)
    fusion.configure(config.reward_model.sandbox_fusion)
    compute_score = load_compute_score(config, getattr(manager, "score_arguments", ARGUMENTS), in_training)
    if scorer_options(compute_score):
        sandbox.announce()
    signature = inspect.signature(manager)
    settings: dict[str, Any] = {
        "timeout_s": config.reward_model.timeout_s,
        "max_resp_len": config.data.max_response_length,
    }
    if has_limits(config.reward_model):
        if "limiter" not in signature.parameters:
            raise ValueError(
                f"reward_model.reward_manager={name} has no limits on calls; set rate_limited, or reward_model.max_concurrent, "
                "max_rpm and max_tpm to null"
            )
        settings["limiter"] = shared_limiter(limits_of(config.reward_model))
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


def scorer_options(function: Any) -> list[dict[str, Any]]:
    """The options of the default function, if `function` is or contains it."""
    if isinstance(function, Ensemble):
        return [options for part in function.parts.values() for options in scorer_options(part.function)]
    inner, options = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    return [dict(options)] if inner in (default_compute_score, default_compute_scores) else []


def check_scorers(reward_fn: RewardFn, first_rows: "Mapping[str, FileRow]", in_training: bool = False) -> None:
    """UnknownDataSourceError if a built-in manager scores by `data_source` and a row has no scorer.

    first_rows: the first row of each data source. in_training: partial credit is given, which is logged.
    """
    for options in scorer_options(reward_fn.compute_score) if isinstance(reward_fn, NaiveRewardManager) else ():
        check_data_sources(options, first_rows, in_training)
