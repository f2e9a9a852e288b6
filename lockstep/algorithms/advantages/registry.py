"""The registry of advantage estimators, and which batch keys each one reads.

An estimator is a function of keyword arguments; its parameters name what it reads. Select one with
`algorithm.adv_estimator`; add your own with `@register_adv_est("name")`, or select it as `module:function`.
"""

import inspect
from collections.abc import Callable, Collection, Hashable
from functools import cache

from torch import Tensor

from lockstep.config.estimators import ESTIMATOR_INPUTS, KEY, required_inputs, signature_inputs
from lockstep.registry import Registry

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
"""(token_level_rewards, response_mask, ..., config) -> (advantages, returns), all (B, R), both 0 outside the mask.

Estimators do not modify their inputs.
"""

ADVANTAGE_ESTIMATORS: Registry[AdvantageFn] = Registry("advantage estimator", key=KEY)


def register_adv_est(name: str) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: register the function as `name`; its parameters without a default are what it needs (a critic for `values`)."""

    def enter(estimator: AdvantageFn) -> AdvantageFn:
        ADVANTAGE_ESTIMATORS.register(str(name))(estimator)
        inputs = signature_inputs(estimator)
        listed = ESTIMATOR_INPUTS.setdefault(str(name), inputs)
        assert listed == inputs, (
            f"config/estimators.py lists {sorted(listed)} for {name}, its signature {sorted(inputs)}"
        )
        return estimator

    return enter


def by_group(estimator: AdvantageFn) -> AdvantageFn:
    """Decorator: a row's advantages depend on the rows of its prompt alone, and on the columns that the parameters name.

    So a large batch is computed a few prompts at a time.
    """
    estimator.by_group = True  # type: ignore[attr-defined]
    return estimator


def is_by_group(estimator: AdvantageFn) -> bool:
    return getattr(estimator, "by_group", False)


def get_adv_estimator_fn(name: str) -> AdvantageFn:
    """The estimator registered as `name`, or outside code if `name` is `module:function`."""
    return ADVANTAGE_ESTIMATORS.get(str(name))


def parameters_of(estimator: AdvantageFn) -> list[inspect.Parameter]:
    return _cached_parameters(estimator) if isinstance(estimator, Hashable) else _parameters(estimator)


def _parameters(estimator: AdvantageFn) -> list[inspect.Parameter]:
    return list(inspect.signature(estimator).parameters.values())


_cached_parameters = cache(_parameters)


_HOW_TO_PROVIDE = {
    "values": "set critic.enable=true or null",
    "reward_baselines": "they come from a greedy rollout of each prompt",
    "entropys": "they come with the old log-probs, which algorithm.rollout_correction.bypass_mode skips",
    "old_log_probs": "they come from the actor's forward pass over the rollout",
    "sum_pi_squared": "set actor_rollout_ref.actor.calculate_sum_pi_squared=true; it comes with the old log-probs, which "
    "algorithm.rollout_correction.bypass_mode skips",
    "index": "it is the uid of the prompt",
}


def check_inputs(name: str, provided: Collection[str]) -> None:
    """ValueError if the estimator needs a batch key that the run will not provide; `index` is the uid."""
    missing = sorted(required_inputs(name) - set(provided))
    if missing:
        reasons = "; ".join(f"{key} ({_HOW_TO_PROVIDE.get(key, 'not computed by any stage')})" for key in missing)
        raise ValueError(f"algorithm.adv_estimator={name} needs batch keys that this run does not compute: {reasons}")
