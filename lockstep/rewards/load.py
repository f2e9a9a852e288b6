"""The reward function of a config: an ensemble, a judge, the user's function, or the built-in scorers by `data_source`.

Imports no torch, so that a run's functions are checked before it is loaded.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.config.ensemble import ENSEMBLE_KEY, JUDGE_KEY, judge_of, reward_parts
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import CustomRewardFunctionConfig, RewardPartConfig
from lockstep.rewards.custom import ARGUMENTS, BATCH_ARGUMENTS, ComputeScore, get_custom_reward_fn
from lockstep.rewards.default import check_scorer_options, default_compute_score, default_compute_scores
from lockstep.rewards.ensemble import COLUMN_FUNCTIONS, Ensemble, Part
from lockstep.rewards.rate_limit import limits_of, shared_limiter

if TYPE_CHECKING:
    from lockstep.rewards.model_judge import Judge


def load_compute_score(
    config: PPOConfig, arguments: tuple[str, ...] = ARGUMENTS, in_training: bool = False
) -> ComputeScore | Ensemble:
    """The function that a reward manager calls with `arguments`; ValueError with the key if it cannot be loaded.

    in_training: scorers give partial credit, and ensembles normalize.
    """
    if config.reward_model.ensemble:
        entries = {name: part for name, part in reward_parts(config.reward_model.ensemble).items() if part.weight}
        parts = {name: _part(config, name, entry, in_training) for name, entry in entries.items()}
        return Ensemble(parts, is_normalized=in_training)
    if config.reward_model.judge.enable:
        return _judge(config)
    custom = config.custom_reward_function
    return get_custom_reward_fn(custom, arguments) or _scorers(custom.reward_kwargs, arguments, in_training)


def _part(config: PPOConfig, name: str, entry: RewardPartConfig, in_training: bool) -> Part:
    key = f"{ENSEMBLE_KEY}.{name}"
    if entry.source in COLUMN_FUNCTIONS:
        return Part(entry, partial(COLUMN_FUNCTIONS[entry.source], **entry.kwargs), is_column=True)
    if entry.source == "judge":
        return Part(entry, _judge(config, f"{key}.kwargs", entry.kwargs))
    if entry.source == "scorer":
        return Part(entry, _scorers(entry.kwargs, ARGUMENTS, in_training, f"{key}.kwargs"))
    function = get_custom_reward_fn(
        CustomRewardFunctionConfig(path=entry.source, reward_kwargs=entry.kwargs),
        ARGUMENTS,
        f"{key}.source",
        f"{key}.kwargs",
    )
    assert function is not None
    return Part(entry, function)


def _judge(config: PPOConfig, key: str = JUDGE_KEY, changes: dict[str, Any] | None = None) -> "Judge":
    from lockstep.rewards.model_judge import Judge  # imports an HTTP client, which other runs do not need

    reward = config.reward_model
    settings = judge_of(reward.judge, key, changes)
    judge = Judge(settings, shared_limiter(limits_of(reward)), reward.timeout_s, key if changes else JUDGE_KEY)
    judge.check_reachable()
    return judge


def _scorers(
    options: dict[str, Any],
    arguments: tuple[str, ...],
    in_training: bool,
    key: str = "custom_reward_function.reward_kwargs",
) -> ComputeScore:
    check_scorer_options(options, key)
    default = default_compute_scores if arguments == BATCH_ARGUMENTS else default_compute_score
    if in_training:
        options = {"in_training": True, **options}
    return partial(default, **options) if options else default
