"""The default reward function: calls the scorer registered for a row's `data_source`.

default_compute_score(data_source, solution_str, ground_truth) --SCORERS or `scorer`--> scorer --> number or dict
"""

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lockstep.registry import Registry, did_you_mean, load_plugin
from lockstep.rewards import scorers
from lockstep.rewards.scorers import (
    environment,
    geo3k,
    gsm8k,
    math,
    math_dapo,
    multiple_choice,
    prime_code,
    prime_math,
    reasoning_gym,
    rlla,
    search_r1_like_qa_em,
)

if TYPE_CHECKING:
    from lockstep.data.files import FileRow

logger = logging.getLogger(__name__)

ScoreResult = float | int | bool | dict[str, Any]
"""A number, or a dict with `score` whose further entries are logged."""

Scorer = Callable[..., Any]
"""`scorer(solution_str, ground_truth, **options)` returns a ScoreResult, or a tuple that begins with the score. It is also
passed the row's `data_source` and `extra_info` if it has parameters of these names."""

SCORERS: Registry[Scorer] = Registry("scorer")
"""Scorers by `data_source`; names may contain the wildcard `*`, and letter case does not matter."""

ROUTES: dict[Scorer, tuple[str, ...]] = {
    gsm8k.compute_score: ("openai/gsm8k", "gsm8k", "shapes"),
    math.compute_score: (
        *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        *("hendrycks/competition_math", "EleutherAI/hendrycks_math"),
    ),
    math_dapo.compute_score: (
        *("math_dapo", "math", "math_dapo_reasoning", "aime*"),
        *("*/DAPO-Math-17k*", "*/AIME*", "*/AMC*"),
    ),
    prime_math.compute_score: (
        *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"),
        *("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
    ),
    partial(prime_code.compute_score, continuous=True): (
        *("codecontests", "apps", "codeforces", "taco"),
        *("deepmind/code_contests", "codeparrot/apps", "open-r1/codeforces", "BAAI/TACO"),
        *("openai_humaneval", "openai/openai_humaneval", "mbpp", "google-research-datasets/mbpp"),
    ),
    geo3k.compute_score: ("hiyouga/geometry3k",),
    search_r1_like_qa_em.compute_score: (
        *("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa"),
        *("searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"),
    ),
    multiple_choice.compute_score: (
        *("multiple_choice", "cais/mmlu*", "TIGER-Lab/MMLU-Pro", "Idavidrein/gpqa*", "allenai/ai2_arc*"),
    ),
    rlla.compute_score: ("rlla*",),
    reasoning_gym.compute_score: ("reasoning_gym/*",),
    environment.compute_score: ("environment", "environment/*", "verifiers/*"),
}

_NEED_TRUTH = {*ROUTES} - {environment.compute_score, reasoning_gym.compute_score}
"""Scorers that cannot score a row without a ground truth."""

for _scorer, _names in ROUTES.items():
    for _name in _names:
        SCORERS.register(_name)(_scorer)

FORMAT_SCORE = 0.1
"""GSM8K in training: score of a wrong number in the right form, unless reward_kwargs has `format_score`. Validation, and the
scorer itself, give 0."""

ROW_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class UnknownDataSourceError(ValueError):
    """No scorer is registered for a row's `data_source`."""


def find_scorer(data_source: str) -> Scorer:
    """The scorer registered under the exact name, else under the first pattern that matches."""
    if data_source in SCORERS:
        return SCORERS.get(data_source)
    for pattern in SCORERS:
        if _matches(data_source, pattern):
            return SCORERS.get(pattern)
    raise UnknownDataSourceError(
        f"no scorer for data_source {data_source!r}. {did_you_mean(data_source, SCORERS)} "
        "Set custom_reward_function.path to a file with your own compute_score, or name a built-in scorer with "
        "custom_reward_function.reward_kwargs.scorer"
    )


def check_data_sources(
    options: Mapping[str, Any], first_rows: "Mapping[str, FileRow]", in_training: bool = False
) -> None:
    """Raise UnknownDataSourceError if a data source has no scorer.

    options: of the default function. first_rows: the first row of each data source. in_training: partial credit is given, which
    is logged.
    """
    for source, row in first_rows.items():
        try:
            scorer = choose_scorer(source, options.get("scorer"))
        except UnknownDataSourceError as error:
            by_model = row.columns["reward_model"].get("style") == "model"
            hint = (
                "; or set reward_model.enable=true, since the row's reward_model.style is 'model'" if by_model else ""
            )
            raise UnknownDataSourceError(f"{row.location}: {error}{hint}") from error
        if scorer in _NEED_TRUTH and row.columns["reward_model"].get("ground_truth") is None:
            raise ValueError(
                f"{row.location} has no ground truth, with which the scorer of data_source {source!r} compares answers; add the "
                "column 'answer', or set custom_reward_function.path to your own function"
            )
        if in_training and scorer is gsm8k.compute_score and "format_score" not in options:
            _announce_format_score()


@cache
def _announce_format_score() -> None:
    logger.info(
        "gsm8k: a wrong number in the right form scores %g in training and 0 in validation; "
        "set custom_reward_function.reward_kwargs.format_score for both",
        FORMAT_SCORE,
    )


def named_scorer(name: str) -> Scorer:
    """`compute_score` of the built-in scorer `name`, or the function behind `module:function`."""
    if ":" in name:
        return load_plugin("custom_reward_function.reward_kwargs.scorer", name)
    known = builtin_names()
    if name not in known:
        raise ValueError(
            f"custom_reward_function.reward_kwargs.scorer={name}: no such scorer. {did_you_mean(name, known)}"
        )
    return importlib.import_module(f"{scorers.__name__}.{name}").compute_score


def builtin_names() -> list[str]:
    """The scorer modules in `lockstep.rewards.scorers`."""
    helpers = ("expression", "grader_process", "latex", "latex_text", "math_grader", "symbolic")
    names = [module.name for module in pkgutil.iter_modules(scorers.__path__)]
    return [name for name in names if name not in helpers and not name.endswith("_child")]


def choose_scorer(data_source: str, scorer: str | Mapping[str, str] | None) -> Scorer:
    """The scorer that `scorer` names, for all rows or by `data_source` pattern; else the registered one."""
    if isinstance(scorer, str):
        return named_scorer(scorer)
    for pattern, name in (scorer or {}).items():
        if _matches(data_source, pattern):
            return named_scorer(name)
    return find_scorer(data_source)


def _matches(data_source: str, pattern: str) -> bool:
    return fnmatchcase(data_source.lower(), pattern.lower())


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    scorer: str | Mapping[str, str] | None = None,
    in_training: bool = False,
    **kwargs: Any,
) -> ScoreResult:
    """Score by `data_source`; each scorer gets the `kwargs` that it accepts, such as `method` of gsm8k.

    in_training: give partial credit, see `FORMAT_SCORE`.
    """
    function = choose_scorer(data_source, scorer)
    parameters = _parameters(function)
    given = {"data_source": data_source, "extra_info": extra_info, **kwargs}
    if in_training and function is gsm8k.compute_score:
        given.setdefault("format_score", FORMAT_SCORE)
    options = {name: given[name] for name in parameters if name in given}
    if "solution_str" in parameters:
        result = function(solution_str=solution_str, ground_truth=ground_truth, **options)
    else:
        result = function(solution_str, ground_truth, **options)
    return float(result[0]) if isinstance(result, tuple) else result


def default_compute_scores(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[Any],
    extra_infos: list[dict[str, Any] | None],
    **kwargs: Any,
) -> list[ScoreResult]:
    """The default reward function with the signature of the batch manager."""
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos)
    return [default_compute_score(*row, **kwargs) for row in rows]


def check_scorer_options(options: dict[str, Any], key: str = "custom_reward_function.reward_kwargs") -> None:
    """Reject a scorer that does not exist and an option that no scorer accepts. key: of the options, for messages."""
    functions = _scorers_in_use(options.get("scorer"))
    known = {"scorer", *(name for function in functions for name in _parameters(function))} - set(ROW_ARGUMENTS)
    for name in options:
        if name not in known:
            raise ValueError(f"{key}.{name}: no built-in scorer accepts it. {did_you_mean(name, known)}")


def external_scorers(scorer: str | Mapping[str, str] | None = None) -> list[Scorer]:
    """The user's scorers. The built-in ones limit their own time and run what may crash in other processes."""
    functions = _scorers_in_use(scorer)
    return [f for f in functions if not getattr(f, "func", f).__module__.startswith(scorers.__name__)]


def _scorers_in_use(scorer: str | Mapping[str, str] | None) -> list[Scorer]:
    named = [scorer] if isinstance(scorer, str) else list((scorer or {}).values())
    return [*(SCORERS.get(source) for source in SCORERS), *(named_scorer(name) for name in named)]


def _parameters(function: Scorer) -> list[str]:
    return list(inspect.signature(function).parameters)
