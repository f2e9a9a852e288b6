"""Whether the policy gets better at the task: reward, accuracy, groups of samples, validation."""

from collections.abc import Callable
from typing import NamedTuple

from lockstep.observability.health.run_view import RECENT, WATCH, Finding, RunView, Series, noise, percent, show, trend
from lockstep.observability.numbers import number

SCORE = "critic/score/mean"
ACCURACY = "reward/acc/mean"
LOW_ACCURACY = 0.2
REWARD_HACK = (
    "The reward pays for something else than right answers: look at samples with a high score whose acc is 0, find what they "
    "have in common, and let the reward function not pay for it, or only for right answers."
)
EQUAL_GROUPS = "critic/score/zero_variance_groups"
WITHOUT_GROUPS = (
    *("gae", "remax", "reinforce_plus_plus"),
    *("gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"),
)
"""Advantage estimators that do not compare the samples of a prompt, or by more than their scores."""
FLAT_STEPS = 40
FLAT_SHARE = 0.05
"""Of the range of scores: a smaller change is none."""


def score_range(run: RunView) -> tuple[float, float]:
    """The least and the highest score of the run."""
    low, high = run.series("critic/score/min").values, run.series("critic/score/max").values
    return (min(low), max(high)) if low and high else (0.0, 0.0)


def is_saturated(run: RunView) -> bool:
    low, high = score_range(run)
    score = run.series(SCORE).last()
    return len(score.values) == RECENT and high > low and score.mean() >= high - 0.02 * (high - low)


def is_constant(run: RunView) -> bool:
    """Whether all responses of the last steps have one and the same score, which is not the highest of the run."""
    ends = [run.series(f"critic/score/{end}").last(5).values for end in ("min", "max")]
    values = {*ends[0], *ends[1]}
    return len(ends[0]) == len(ends[1]) == 5 and len(values) == 1 and not is_saturated(run)


def reward_is_constant(run: RunView) -> Finding | None:
    if not is_constant(run):
        return None
    score = run.series(SCORE)
    value = score.values[-1]
    begin = next((score.steps[i + 1] for i in range(len(score.values) - 2, -1, -1) if score.values[i] != value), None)
    return Finding(
        "reward_constant",
        "bad",
        "Every response gets the same score",
        f"All responses have scored {show(value)} since step {begin or score.steps[0]}: no response is better than another, "
        "so nothing is learned.",
        "Look at some responses and score them by hand: does the reward function find the answer (format, ground truth, "
        "data_source)? "
        "If the task is too hard, start with easier prompts or with supervised fine-tuning.",
        "rewards.md",
        (SCORE, "critic/score/max"),
        (begin or score.steps[0], score.steps[-1]),
        run.samples(sort="reward"),
    )


class Accuracy(NamedTuple):
    """metric: its name; begin, now: means of the first and the last values; rise: over the later half, if it is significant."""

    metric: str
    begin: float
    now: float
    rise: float


def accuracy(run: RunView) -> Accuracy | None:
    """That of the training samples or else, if it is low, of the validation: prompts of a validation may just be harder."""
    series = run.series(ACCURACY)
    if series.values:
        steps = list(series.steps[-RECENT:])
        if len(steps) < RECENT or steps != list(run.series(SCORE).steps[-RECENT:]):
            return None
        return _accuracy(ACCURACY, series, 5, RECENT)
    for name, found in validations(run):
        if "/acc/" in name and len(found.values) >= 4:
            result = _accuracy(name, found, 2, 2)
            return result if result.now < LOW_ACCURACY else None
    return None


def _accuracy(name: str, series: Series, num_begin: int, num_now: int) -> Accuracy:
    later = trend(series.last(max(3, num_now, len(series.values) // 2)).values)
    begin = Series(series.steps[:num_begin], series.values[:num_begin]).mean()
    return Accuracy(name, begin, series.last(num_now).mean(), later.change if later.is_rise else 0.0)


def is_wrong(run: RunView) -> bool:
    """Whether few of the training samples are right."""
    found = accuracy(run)
    return found is not None and found.metric == ACCURACY and found.now < LOW_ACCURACY


def reward_is_not_accuracy(run: RunView) -> Finding | None:
    """The gap between score and accuracy has grown. A score may be larger by design, such as by a bonus for the format: only if
    the accuracy does not rise."""
    score, (low, high), found = run.series(SCORE), score_range(run), accuracy(run)
    if len(score.values) < 2 * RECENT or high <= low or found is None:
        return None
    begin, now = Series(score.steps[:5], score.values[:5]).mean(), score.last().mean()
    gap = min(now, (now - low) / (high - low)) - found.now
    gained, learned = (now - begin) / (high - low), found.now - found.begin
    if gap <= 0.3 or gained - learned < 0.15 or max(learned, found.rise) >= max(0.05, 0.2 * gained):
        return None
    return Finding(
        "reward_without_accuracy",
        "bad",
        "The reward rises without the accuracy" if gained > 0.05 else "The accuracy falls, and the reward does not",
        f"The mean score was {show(begin)} in the first steps and is {show(now)} in the last {RECENT} (scores are from {show(low)} "
        f"to {show(high)}), while {found.metric} was {show(found.begin)} and is {show(found.now)}.",
        REWARD_HACK,
        "rewards.md",
        (SCORE, found.metric),
        (score.steps[0], score.steps[-1]),
        run.samples(sort="reward"),
    )


def reward_is_saturated(run: RunView) -> Finding | None:
    if not is_saturated(run) or reward_is_not_accuracy(run) is not None:
        return None
    low, high = score_range(run)
    score = run.series(SCORE)
    count = 0
    while count < len(score.values) and score.values[-1 - count] >= high - 0.05 * (high - low):
        count += 1
    begin = score.steps[-count]
    equal = run.series(EQUAL_GROUPS).last()
    groups = f"; in {percent(equal.mean())} of the groups all samples score the same" if equal.values else ""
    validation = next((number(series.values[-1]) for _, series in validations(run)), None)
    is_solved = validation is not None and validation >= high - 0.1 * (high - low)
    is_long = count >= 20 and count >= 0.2 * len(score.values)
    wrong = is_wrong(run)
    return Finding(
        "reward_saturated",
        "warning" if wrong or (is_long and not is_solved) else "info",
        f"The reward is at its maximum{', but few answers are right' if wrong else ': nothing is left to learn'}",
        f"The mean score is {show(score.last().mean())} of at most {show(high)} since step {begin} ({count} steps){groups}."
        + (f" Validation agrees ({show(validation)})." if validation is not None and is_solved else "")
        + (f" {ACCURACY} is {show(run.series(ACCURACY).last().mean())}." if wrong else ""),
        REWARD_HACK
        if wrong
        else "Stop here, or go on with harder prompts (data.train_files), a stricter reward, or "
        "algorithm.filter_groups.enable=true to train only "
        "on prompts whose samples differ. Read some responses with a high score: are they right, or do they only please the "
        "reward function?",
        "rewards.md" if wrong else WATCH,
        (SCORE, *((ACCURACY,) if wrong else ()), *((EQUAL_GROUPS,) if equal.values else ())),
        (begin, score.steps[-1]),
        run.samples(variance="zero"),
    )


def reward_is_flat(run: RunView) -> Finding | None:
    """Sure that the reward has changed by less than 5 % of its range; what noise hides is not called flat."""
    score = run.series(SCORE)
    low, high = score_range(run)
    if len(score.values) < FLAT_STEPS or high <= low or is_saturated(run) or is_constant(run):
        return None
    window = score.last(max(FLAT_STEPS, len(score.values) // 2))
    change, error = trend(window.values)
    least = FLAT_SHARE * (high - low)
    if change + 2 * error > least or change - 2 * error < -least:
        return None
    gained = window.mean() - Series(score.steps[:RECENT], score.values[:RECENT]).mean()
    if gained > 2 * least and len(window.values) < 100:  # it has learned, and rests
        return None
    begin, end = window.span
    return Finding(
        "reward_flat",
        "info" if gained > 2 * least else "warning",
        "The reward does not rise" if gained <= 2 * least else "The reward no longer rises",
        f"From step {begin} to {end} it changed by {show(change)} (± {show(2 * error)}), with scores from {show(low)} to "
        f"{show(high)}; "
        f"its mean is {show(window.mean())}.",
        "Look at the groups: equal scores give no gradient. If they differ, raise actor_rollout_ref.actor.optim.lr, "
        "actor_rollout_ref.rollout.n or "
        "data.train_batch_size; if they do not, change the difficulty of the prompts or give partial credit in the reward.",
        WATCH,
        (SCORE, "critic/score/max", "actor/grad_norm"),
        (begin, end),
        run.samples(sort="reward"),
    )


def reward_falls(run: RunView) -> Finding | None:
    score = run.series(SCORE)
    low, high = score_range(run)
    if len(score.values) < 2 * RECENT or high <= low:
        return None
    window = score.last(max(2 * RECENT, len(score.values) // 3))
    means = [sum(score.values[i : i + RECENT]) / RECENT for i in range(len(score.values) - RECENT + 1)]
    drop = max(means) - means[-1]
    if not trend(window.values).is_fall or drop < max(0.15 * (high - low), 2 * noise(score.values)):
        return None
    best = score.steps[means.index(max(means))]
    return Finding(
        "reward_falls",
        "bad" if drop > 0.4 * (high - low) else "warning",
        "The reward falls",
        f"The mean score of {RECENT} steps was {show(max(means))} at step {best} and is {show(means[-1])} now.",
        "The policy degrades: lower actor_rollout_ref.actor.optim.lr, use a KL term "
        "(actor_rollout_ref.actor.use_kl_loss=true), or resume from a checkpoint "
        f"before step {best + RECENT} (trainer.resume_mode=resume_path).",
        WATCH,
        (SCORE, "actor/entropy", "actor/grad_norm"),
        (best, score.steps[-1]),
        run.samples(sort="reward"),
    )


def groups_are_equal(run: RunView) -> Finding | None:
    share = run.series(EQUAL_GROUPS).last()
    if len(share.values) < 5 or share.mean() < 0.7 or is_saturated(run) or is_constant(run):
        return None
    if run.setting("algorithm.adv_estimator") in WITHOUT_GROUPS:
        return None
    score = run.series(SCORE).last()
    low, high = score_range(run)
    is_easy = bool(score.values) and high > low and score.mean() > (low + high) / 2
    is_hack = is_easy and is_wrong(run)
    return Finding(
        "equal_groups",
        "bad" if share.mean() >= 0.95 else "warning",
        f"{percent(share.mean())} of the groups have no variance",
        f"In the last {len(share.values)} steps all samples of a prompt scored the same for {percent(share.mean())} of the "
        "prompts: with group-relative advantages these teach nothing.",
        REWARD_HACK
        if is_hack
        else f"The prompts are too {'easy' if is_easy else 'hard'} for this policy: mix in {'harder' if is_easy else 'easier'} "
        "ones, raise actor_rollout_ref.rollout.n, "
        "or set algorithm.filter_groups.enable=true, which samples until a batch has groups that differ.",
        "rewards.md" if is_hack else "algorithms.md",
        (EQUAL_GROUPS, SCORE, ACCURACY) if is_hack else (EQUAL_GROUPS, SCORE),
        share.span,
        run.samples(variance="zero"),
    )


def validations(run: RunView) -> list[tuple[str, Series]]:
    """The main validation metrics, the first of each source first."""
    names = [name for name in run.names if name.startswith("val-core/")]
    means = [name for name in names if "/mean@" in name] or names
    return [(name, series) for name in means if (series := run.read(name).finite()).values]


def validation_falls(run: RunView) -> Finding | None:
    score = run.series(SCORE)
    for name, series in validations(run):
        values = series.values
        if len(values) < 6 or not score.values:
            continue
        means = [sum(values[i : i + 3]) / 3 for i in range(len(values) - 2)]
        best = means.index(max(means))
        drop = means[best] - means[-1]
        low, high = score_range(run)
        if best >= len(means) - 3 or drop < max(0.03 * ((high - low) or 1.0), 3 * noise(values)):
            continue
        then = [value for step, value in zip(*score) if step <= series.steps[best + 2]][-RECENT:]
        if not then or score.last().mean() <= sum(then) / len(then):
            continue
        return Finding(
            "validation_falls",
            "warning",
            "Validation falls while the reward rises",
            f"{name} was {show(means[best])} around step {series.steps[best + 1]} and is {show(means[-1])} in the last three "
            "validations; the training "
            f"reward went from {show(sum(then) / len(then))} to {show(score.last().mean())}.",
            "The policy overfits the training prompts, or pleases the reward function by something else than right answers: "
            "read responses with a high "
            "score, use more data or a KL term, and keep the checkpoint of the best validation.",
            WATCH,
            (name, SCORE),
            (series.steps[best], series.steps[-1]),
            {"kind": "validation", "sort": "reward"} if run.setting("trainer.validation_data_dir") else None,
        )
    return None


RULES: tuple[Callable[[RunView], Finding | None], ...] = (
    reward_is_not_accuracy,
    reward_is_constant,
    reward_falls,
    reward_is_flat,
    groups_are_equal,
    reward_is_saturated,
    validation_falls,
)
