"""The batch keys that each advantage estimator needs, known before torch is imported.

Those of the built-in ones are listed in `AdvantageEstimator`. Estimators that users register are added by their signature;
outside code (`module:function`) is loaded and inspected.
"""

import inspect
from collections.abc import Callable
from typing import Any

from lockstep.config.algorithm import AdvantageEstimator
from lockstep.config.errors import ConfigError, Problem
from lockstep.registry import find_registered, load_object, no_such_name

KEY = "algorithm.adv_estimator"
ADV_KWARGS = "algorithm.adv_kwargs"


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
