"""The default reward function: the scorer that is registered for a row's `data_source`."""

import inspect
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from lockstep.registry import Registry, did_you_mean
from lockstep.rewards.scorers import gsm8k, math, math_dapo

ScoreResult = float | int | bool | dict[str, Any]
"""A number, or a dict with `score` whose further entries are logged."""

Scorer = Callable[..., ScoreResult]
"""`scorer(solution_str, ground_truth, **options)`."""

SCORERS: Registry[Scorer] = Registry("scorer")
"""By `data_source`; a name may hold `*` for any text."""

SCORERS.register("openai/gsm8k")(gsm8k.compute_score)

for _name in (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
):
    SCORERS.register(_name)(math.compute_score)

for _name in ("math_dapo", "math", "math_dapo_reasoning", "aime*"):
    SCORERS.register(_name)(math_dapo.compute_score)


class UnknownDataSourceError(ValueError):
    """A row whose `data_source` no scorer is registered for."""


def find_scorer(data_source: str) -> Scorer:
    """The scorer of an exact name, or else of the first pattern that matches."""
    if data_source in SCORERS:
        return SCORERS.get(data_source)
    for pattern in SCORERS:
        if "*" in pattern and fnmatchcase(data_source, pattern):
            return SCORERS.get(pattern)
    raise UnknownDataSourceError(
        f"no scorer for data_source {data_source!r}. {did_you_mean(data_source, SCORERS)} "
        "Set custom_reward_function.path to a file with your own compute_score"
    )


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> ScoreResult:
    """Score by `data_source`; of `kwargs` each scorer gets those that it takes, such as `method` of gsm8k."""
    scorer = find_scorer(data_source)
    options = {name: value for name, value in kwargs.items() if name in _option_names(scorer)}
    return scorer(solution_str, ground_truth, **options)


def check_scorer_options(options: dict[str, Any]) -> None:
    """Refuse an option that no registered scorer takes."""
    known = {name for source in SCORERS for name in _option_names(SCORERS.get(source))}
    for name in options:
        if name not in known:
            raise ValueError(
                f"custom_reward_function.reward_kwargs.{name}: no built-in scorer takes it. {did_you_mean(name, known)}"
            )


def _option_names(scorer: Scorer) -> list[str]:
    return list(inspect.signature(scorer).parameters)[2:]
