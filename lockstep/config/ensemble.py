"""`reward_model.ensemble` and `reward_model.judge`: their entries, and whether they fit the rest of the config."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lockstep.config.errors import NO_VALUE, ConfigError, Problem
from lockstep.config.reward import JudgeConfig, RewardPartConfig
from lockstep.config.schema import to_dataclass, to_plain

ENSEMBLE_KEY, JUDGE_KEY = "reward_model.ensemble", "reward_model.judge"
BUILT_IN_SOURCES = ("scorer", "judge", "reward_model", "turn_rewards", "rollout_reward_scores")
OPTIONS = {"turn_rewards": ("reduce",), "rollout_reward_scores": ("name",), "reward_model": ()}
"""Keys of `kwargs`, for the sources whose options are not checked elsewhere."""
RESERVED = {
    *("score", "reward_failed", "uid", "finish_reason", "index", "data_source", "reward_model", "extra_info"),
    *("raw_prompt", "raw_prompt_ids", "agent_name", "tools_kwargs", "interaction_kwargs", "__num_turns__", "messages"),
    *("tool_rewards", "turn_scores", "turn_rewards", "reward_scores", "earlier_trajectories", "is_padding"),
    "multi_modal_inputs",
}
"""Names of columns that a part's value would replace."""


def reward_parts(ensemble: Mapping[str, Any]) -> dict[str, RewardPartConfig]:
    """The entries of `reward_model.ensemble`; ConfigError with their keys."""
    parts, problems = {}, []
    for name, entry in ensemble.items():
        key = f"{ENSEMBLE_KEY}.{name}"
        if not isinstance(entry, Mapping):
            problems.append(Problem(key, entry, "must be a mapping such as {source: scorer, weight: 1.0}"))
            continue
        try:
            parts[str(name)] = part = to_dataclass(RewardPartConfig, entry)
        except ConfigError as error:
            problems += [replace(problem, key=f"{key}.{problem.key}") for problem in error.problems]
            continue
        problems += _part_problems(key, part)
    if parts and not problems and not any(part.weight for part in parts.values()):
        problems.append(Problem(ENSEMBLE_KEY, dict(ensemble), "all weights are 0"))
    if problems:
        raise ConfigError(problems)
    return parts


def _part_problems(key: str, part: RewardPartConfig) -> list[Problem]:
    found = []
    if (name := key.rpartition(".")[2]) in RESERVED:
        found.append(Problem(key, NO_VALUE, f"the batch has a column {name!r} already; choose another name"))
    if part.source not in BUILT_IN_SOURCES and ":" not in part.source:
        allowed = f"must be one of {', '.join(BUILT_IN_SOURCES)}, or a function as file.py:function"
        found.append(Problem(f"{key}.source", part.source, allowed))
    if part.clip is not None and part.clip[0] > part.clip[1]:
        found.append(Problem(f"{key}.clip", part.clip, "the first must not be above the second"))
    if part.source == "turn_rewards" and (part.clip or part.normalize):
        found.append(Problem(f"{key}.source", part.source, "has a value per turn: clip and normalize do not apply"))
    known = OPTIONS.get(part.source)
    for option in part.kwargs if known is not None else ():
        if option not in (known or ()):
            found.append(Problem(f"{key}.kwargs.{option}", part.kwargs[option], f"{part.source} has no such option"))
    if part.source == "turn_rewards" and part.kwargs.get("reduce", "sum") not in ("sum", "mean"):
        found.append(Problem(f"{key}.kwargs.reduce", part.kwargs["reduce"], "must be sum or mean"))
    return found


def judge_of(base: JudgeConfig, key: str = JUDGE_KEY, changes: Mapping[str, Any] | None = None) -> JudgeConfig:
    """A judge's settings with an ensemble entry's `kwargs`; ConfigError if they are incomplete."""
    try:
        config = to_dataclass(JudgeConfig, {**to_plain(base), **(changes or {})})
    except ConfigError as error:
        raise ConfigError([replace(problem, key=f"{key}.{problem.key}") for problem in error.problems]) from error
    problems = []
    for name, example in (("base_url", "http://127.0.0.1:8000/v1"), ("model", "the model's name there")):
        if not getattr(config, name):
            problems.append(Problem(f"{key}.{name}", getattr(config, name), f"the judge needs it: {example}"))
    if config.base_url and not config.base_url.startswith(("http://", "https://")):
        problems.append(Problem(f"{key}.base_url", config.base_url, "must be a URL such as http://127.0.0.1:8000/v1"))
    if config.score_range[0] >= config.score_range[1]:
        problems.append(Problem(f"{key}.score_range", config.score_range, "the first must be below the second"))
    if problems:
        raise ConfigError(problems)
    return config


def reward_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of the ensemble and the judge, and with other keys that they exclude or need."""
    manager, ensemble = values["reward_model.reward_manager"], values[ENSEMBLE_KEY]
    has_model, path = values.get("reward_model.enable", False), values["custom_reward_function.path"]
    is_judged, enable = values[f"{JUDGE_KEY}.enable"], f"{JUDGE_KEY}.enable"
    judge = JudgeConfig(**{name: values[f"{JUDGE_KEY}.{name}"] for name in to_plain(JudgeConfig())})
    parts: dict[str, RewardPartConfig] = {}
    try:
        parts = reward_parts(ensemble)
        if is_judged:
            judge_of(judge)
    except ConfigError as error:
        yield from error.problems
        return
    for name, part in parts.items():
        key = f"{ENSEMBLE_KEY}.{name}"
        if part.source == "judge" and part.weight:
            try:
                judge_of(judge, f"{key}.kwargs" if part.kwargs else JUDGE_KEY, part.kwargs)
            except ConfigError as error:
                yield from error.problems
        if part.source == "reward_model" and not has_model:
            yield Problem(f"{key}.source", "reward_model", "there is none; set reward_model.enable=true")
        if part.normalize and values.get("algorithm.adv_estimator") == "remax":
            message = "the greedy baseline has no group; set null"
            yield Problem(f"{key}.normalize", part.normalize, message, also=("algorithm.adv_estimator",))
    sources = {part.source for part in parts.values()}
    in_ensemble = f"name it as a source in {ENSEMBLE_KEY}"
    if ensemble and path:
        message = f"{ENSEMBLE_KEY} is the reward; {in_ensemble}"
        yield Problem("custom_reward_function.path", path, message, also=(ENSEMBLE_KEY,))
    if ensemble and has_model and "reward_model" not in sources:
        message = f"{ENSEMBLE_KEY} is the reward; {in_ensemble}, or set false"
        yield Problem("reward_model.enable", True, message, also=(ENSEMBLE_KEY,))
    if is_judged and (has_model or path or ensemble) and "judge" not in sources:
        yield Problem(enable, True, f"there is another reward; {in_ensemble}", also=(ENSEMBLE_KEY,))
    if (is_judged or ensemble) and manager in ("batch", "functions"):
        message = f"scores with one function; set naive for {ENSEMBLE_KEY if ensemble else enable}"
        yield Problem("reward_model.reward_manager", manager, message)
