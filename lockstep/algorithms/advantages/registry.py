"""The registry of advantage estimators, and what each one needs of the batch.

An estimator is a function of keyword arguments; the names of its parameters say what it needs. Select one
with `algorithm.adv_estimator`; add one with `@register_adv_est("name")` or name outside code as `module:function`.
"""

import inspect
from collections.abc import Callable, Collection, Hashable
from enum import StrEnum
from functools import cache

from torch import Tensor

from lockstep.registry import Registry

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
"""(token_level_rewards, response_mask, ..., config) -> (advantages, returns), all (B, R), both 0 outside the mask.

The inputs are left as they are.
"""


class AdvantageEstimator(StrEnum):
    """The estimators that come with the package; their values are the names in `algorithm.adv_estimator`."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    OPO = "opo"
    GPG = "gpg"
    GDPO = "gdpo"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    MAXRL = "maxrl"
    EGPO = "egpo"


ADVANTAGE_ESTIMATORS: Registry[AdvantageFn] = Registry("advantage estimator", key="algorithm.adv_estimator")


def register_adv_est(name: str) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: make the function selectable as `name`."""
    return ADVANTAGE_ESTIMATORS.register(str(name))


def get_adv_estimator_fn(name: str) -> AdvantageFn:
    """The estimator registered as `name`, or outside code where `name` is `module:function`."""
    return ADVANTAGE_ESTIMATORS.get(str(name))


def parameters_of(estimator: AdvantageFn) -> list[inspect.Parameter]:
    return _read_once(estimator) if isinstance(estimator, Hashable) else _parameters(estimator)


def _parameters(estimator: AdvantageFn) -> list[inspect.Parameter]:
    return list(inspect.signature(estimator).parameters.values())


_read_once = cache(_parameters)


def required_inputs(name: str) -> set[str]:
    """Names of the parameters that the estimator cannot do without."""
    parameters = parameters_of(get_adv_estimator_fn(name))
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty}


def may_read(name: str, *keys: str) -> bool:
    """Whether the estimator could read one of these batch keys: ours name what they read, others may take everything."""
    estimator = get_adv_estimator_fn(name)
    parameters = parameters_of(estimator)
    is_ours = estimator.__module__.startswith("lockstep.")
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD or p.name == "batch" for p in parameters)
    return any(p.name in keys for p in parameters) or (takes_all and not is_ours)


_PROVIDERS = {
    "values": "set critic.enable=true or leave it null",
    "reward_baselines": "they come from a greedy rollout of each prompt",
    "entropys": "they come with the old log-probs, which algorithm.rollout_correction.bypass_mode leaves out",
    "old_log_probs": "they come from the actor's forward over the rollout",
    "sum_pi_squared": "set actor_rollout_ref.actor.calculate_sum_pi_squared=true; it comes with the old log-probs, which "
    "algorithm.rollout_correction.bypass_mode leaves out",
    "index": "it is the uid of the prompt",
}
"""Input to where it comes from."""

_ALWAYS = {"token_level_rewards", "response_mask", "gamma", "lam", "config", "batch", "non_tensor_batch"}


def check_inputs(name: str, provided: Collection[str]) -> None:
    """ValueError where the estimator needs a batch key that will not be there; `index` stands for uid.

    To be called before training with the keys that the run is going to write.
    """
    missing = sorted(required_inputs(name) - _ALWAYS - set(provided))
    if missing:
        reasons = "; ".join(f"{key} ({_PROVIDERS.get(key, 'no stage of the run writes it')})" for key in missing)
        raise ValueError(f"algorithm.adv_estimator={name} needs what this run does not compute: {reasons}")


def needs_values(name: str) -> bool:
    """Whether the estimator reads a critic's values."""
    return "values" in required_inputs(name)


def needs_groups(name: str) -> bool:
    """Whether the estimator compares the samples of one prompt, so that `rollout.n` should be at least 2."""
    return "index" in required_inputs(name)
