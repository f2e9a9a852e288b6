"""Settings of a user's policy loss or advantage estimator: its keyword-only parameters.

    def my_loss(old_log_prob, ..., *, beta: float = 0.1, mode: Literal["a", "b"] = "a"): ...

    actor_rollout_ref.actor.policy_loss.loss_kwargs: {beta: 0.2}  ──►  my_loss(..., beta=0.2, mode="a")

A value is converted to the parameter's annotation; without one, to the type of its default. A type of `bounds.py` bounds it.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from lockstep.config.errors import NO_VALUE, ConfigError, Problem
from lockstep.config.estimators import ADV_KWARGS, ESTIMATOR_INPUTS, PARAMETERS
from lockstep.config.policy_loss import BUILT_IN_LOSSES, LOSS_NAMES
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import Mismatch, bound_of, coerce, describe
from lockstep.registry import did_you_mean, find_registered, load_object

LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
LOSS_KWARGS = "actor_rollout_ref.actor.policy_loss.loss_kwargs"
LOSS_ARGUMENTS = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
)
"""What every policy loss is called with."""
PREPARE = "prepare"
"""Attribute of a policy loss: the function that prepares a whole mini-batch for it (algorithms/losses/preparation.py)."""

Function = Callable[..., Any]


def loss_settings(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a policy loss: the given value or the default; ConfigError if one is wrong or missing."""
    return _checked(function, given, LOSS_KWARGS, LOSS_ARGUMENTS)


def estimator_settings(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """The same for an advantage estimator."""
    return _checked(function, given, ADV_KWARGS, PARAMETERS)


def setting_problems(config: PPOConfig) -> Iterator[Problem]:
    """What is wrong with `loss_kwargs` and `adv_kwargs`, before anything is loaded but the user's code."""
    policy_loss, algorithm = config.actor_rollout_ref.actor.policy_loss, config.algorithm
    name, loss = policy_loss.loss_mode, _find(policy_loss.loss_mode, "policy loss")
    if loss is not None or name in LOSS_NAMES:
        yield from _settings(loss, policy_loss.loss_kwargs, LOSS_KWARGS, LOSS_ARGUMENTS, name)[1]
    name, estimator = algorithm.adv_estimator, _find(algorithm.adv_estimator, "advantage estimator")
    if estimator is not None or name in ESTIMATOR_INPUTS:
        yield from _settings(estimator, algorithm.adv_kwargs, ADV_KWARGS, PARAMETERS, name)[1]


def is_prepared(loss: str) -> bool:
    """Whether the policy loss of this name has a `prepare` function, which reads the old log-probs."""
    if loss in BUILT_IN_LOSSES:
        return BUILT_IN_LOSSES[loss].is_prepared
    return hasattr(_find(loss, "policy loss"), PREPARE)


def _find(name: str, kind: str) -> Function | None:
    """None if it is built in and not imported yet, or if it cannot be loaded, which other checks report."""
    try:
        found = load_object(name) if ":" in name else find_registered(kind, name)
    except (ValueError, ImportError):
        return None
    return found if callable(found) else None


def _checked(function: Function, given: Mapping[str, Any], key: str, arguments: Collection[str]) -> dict[str, Any]:
    values, problems = _settings(function, given, key, arguments, getattr(function, "__qualname__", repr(function)))
    if problems:
        raise ConfigError(problems)
    return values


def _settings(
    function: Function | None, given: Mapping[str, Any], key: str, arguments: Collection[str], name: str
) -> tuple[dict[str, Any], list[Problem]]:
    """Values and problems. arguments: parameters that the run provides. name: of the function, for messages."""
    parameters: dict[str, inspect.Parameter] = {}
    names: dict[str, Any] = {}
    if function is not None:
        parameters = dict(inspect.signature(function).parameters)
        names = getattr(inspect.unwrap(function), "__globals__", {})
    known = {p.name: p for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in arguments}
    values = {p.name: p.default for p in known.values() if p.default is not p.empty}
    problems = []
    for setting, value in given.items():
        try:
            if setting in known:
                values[setting] = _converted(value, _annotation(known[setting], names))
                continue
            message = _unknown(setting, name, known, is_parameter=setting in parameters)
        except Mismatch as error:
            message = f"must be {error}"
        problems.append(Problem(f"{key}.{setting}", value, message))
    missing = [setting for setting in known if setting not in values and setting not in given]
    problems += [Problem(f"{key}.{setting}", NO_VALUE, f"must be set; {name} needs it") for setting in missing]
    return values, problems


def _unknown(setting: str, name: str, known: Collection[str], is_parameter: bool) -> str:
    if is_parameter:
        return f"{name} has an ordinary parameter of this name; settings come after `*` in its signature"
    if not known:
        return f"{name} takes no settings (those are keyword-only parameters of a function); remove it"
    return f"{name} has no such setting. {did_you_mean(setting, known)}"


def _annotation(parameter: inspect.Parameter, names: dict[str, Any]) -> Any:
    """The type of a parameter. names: what an annotation that is text may refer to."""
    annotation, default = parameter.annotation, parameter.default
    if annotation is parameter.empty:
        kinds: dict[type, Any] = {bool: bool, int: int | float, float: float, str: str}
        return kinds.get(type(default), Any)
    if isinstance(annotation, str):  # from __future__ import annotations
        try:
            return eval(annotation, names)
        except (NameError, AttributeError, TypeError, SyntaxError):
            return Any
    return annotation


def _converted(value: Any, annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        value, bound = _converted(value, get_args(annotation)[0]), bound_of(annotation)
        if bound is not None and not bound.allows(value):
            raise Mismatch(bound.message.removeprefix("must be "))
        return value
    try:
        describe(annotation)
    except (KeyError, TypeError):  # not a type of config values
        if isinstance(annotation, type) and not isinstance(value, annotation):
            raise Mismatch(f"of type {annotation.__name__}") from None
        return value
    return coerce(value, annotation)
