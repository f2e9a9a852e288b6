"""The advantage estimators and the batch keys each one needs: one list for the config checks and for the registry.

It is kept here, below `algorithms`, so that a config is checked before torch is imported. Estimators that users register are
added by their signature; outside code (`module:function`) is loaded and inspected.
"""

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from lockstep.config.errors import ConfigError, Problem
from lockstep.registry import find_registered, load_object, no_such_name

KEY = "algorithm.adv_estimator"
ADV_KWARGS = "algorithm.adv_kwargs"


class AdvantageEstimator(StrEnum):
    """The built-in estimators: name in `algorithm.adv_estimator`, then the batch keys that it needs.

    values:           from a critic.
    index:            the prompt of each sample (its uid): the estimator compares the samples of one prompt.
    reward_baselines: scores of a greedy rollout.
    The others come with the old log-probs.
    """

    inputs: frozenset[str]

    def __new__(cls, name: str, *inputs: str) -> "AdvantageEstimator":
        member = str.__new__(cls, name)
        member._value_ = name
        member.inputs = frozenset(inputs)
        return member

    GAE = "gae", "values"
    GRPO = "grpo", "index"
    GRPO_VECTORIZED = "grpo_vectorized", "index"
    GRPO_PASSK = "grpo_passk", "index"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline", "index"
    REMAX = "remax", "reward_baselines"
    RLOO = "rloo", "index"
    RLOO_VECTORIZED = "rloo_vectorized", "index"
    OPO = "opo", "index"
    GPG = "gpg", "index"
    GDPO = "gdpo", "index"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline", "index", "old_log_probs", "sum_pi_squared"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline", "index", "old_log_probs", "sum_pi_squared"
    MAXRL = "maxrl", "index"
    EGPO = "egpo", "index", "entropys"


ESTIMATOR_INPUTS: dict[str, frozenset[str]] = {str(member): member.inputs for member in AdvantageEstimator}
"""Estimator name to the batch keys it needs; `register_adv_est` adds to it."""

_FROM_THE_BATCH = {"token_level_rewards", "response_mask", "batch", "non_tensor_batch"}
_FROM_THE_CONFIG = {"gamma", "lam", "norm_adv_by_std_in_grpo", "config"}


BATCH_INPUTS = frozenset[str]().union(
    *(member.inputs for member in AdvantageEstimator), ("rollout_log_probs", "token_level_scores")
)
"""Batch keys that a run can compute for an estimator."""
PARAMETERS = sorted(BATCH_INPUTS | _FROM_THE_BATCH | _FROM_THE_CONFIG)
"""What an estimator can name as parameters."""


def required_inputs(name: str) -> frozenset[str]:
    """Batch keys that the estimator `name` needs; ConfigError if there is no such estimator."""
    if name in ESTIMATOR_INPUTS:
        return ESTIMATOR_INPUTS[name]
    if (registered := find_registered("advantage estimator", name)) is not None:  # in another process
        return signature_inputs(registered)
    if ":" not in name:
        message = no_such_name(name, ESTIMATOR_INPUTS, "advantage estimator")
        raise ConfigError([Problem(KEY, name, message)])
    try:
        return signature_inputs(load_object(name))
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError([Problem(KEY, name, str(error))]) from error


def signature_inputs(estimator: Callable[..., Any]) -> frozenset[str]:
    """The parameters without a default, except those that every run provides and settings (see `plugin_settings`)."""
    parameters = inspect.signature(estimator).parameters.values()
    required = {
        p.name
        for p in parameters
        if p.default is p.empty
        and (p.kind is p.POSITIONAL_OR_KEYWORD or (p.kind is p.KEYWORD_ONLY and p.name in PARAMETERS))
    }
    return frozenset(required - _FROM_THE_BATCH - _FROM_THE_CONFIG)


def may_read(name: str, *keys: str) -> bool:
    """Whether the estimator could read one of these batch keys: built-in ones name what they read, others may read everything."""
    if name in set(AdvantageEstimator):
        return not AdvantageEstimator(name).inputs.isdisjoint(keys)
    estimator = find_registered("advantage estimator", name) or load_object(name)
    parameters = inspect.signature(estimator).parameters.values()
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD or p.name == "batch" for p in parameters)
    return takes_all or any(p.name in keys for p in parameters)


def needs_values(name: str) -> bool:
    """Whether the estimator reads a critic's values."""
    return "values" in required_inputs(name)


def needs_groups(name: str) -> bool:
    """Whether the estimator compares the samples of one prompt, so that `rollout.n` must be at least 2."""
    return "index" in required_inputs(name)
