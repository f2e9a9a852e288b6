"""Whether the policy, the critic or the model learns: reward, entropy, KL, gradients, validation, losses."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from lockstep.observability.health.run_view import (
    RECENT,
    Finding,
    RunView,
    Series,
    noise,
    percent,
    show,
    trend,
)
from lockstep.observability.numbers import number

SCORE = "critic/score/mean"
ACCURACY = "reward/acc/mean"
LOW_ACCURACY = 0.2
REWARD_HACK = (
    "The reward pays for something else than right answers: look at samples with a high score whose acc is 0, find what they "
    "have in common, and let the reward function not pay for it, or only for right answers."
)
EQUAL_GROUPS = "critic/score/zero_variance_groups"
WATCH = "metrics.md#what-to-watch"
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


def entropy_collapses(run: RunView) -> Finding | None:
    entropy = run.series("actor/entropy")
    if len(entropy.values) < 2 * RECENT or is_saturated(run):
        return None
    begin, now = Series(entropy.steps[:5], entropy.values[:5]).mean(), entropy.last().mean()
    if not 0 <= now < min(0.1, 0.15 * begin):
        return None
    score, (low, high) = run.series(SCORE).last(), score_range(run)
    if score.values and score.mean() >= high - 0.1 * (high - low):  # a solved task needs no choice
        return None
    return Finding(
        "entropy_collapse",
        "warning",
        "The entropy has collapsed",
        f"It was {show(begin)} nats per token at the start and is {show(now)} in the last {RECENT} steps, while the mean "
        "score is "
        f"{show(score.mean()) if score.values else 'unknown'}: samples of a prompt become identical.",
        "Raise actor_rollout_ref.actor.clip_ratio_high (0.28 in DAPO) or actor_rollout_ref.actor.entropy_coeff, lower "
        "actor_rollout_ref.actor.optim.lr, or "
        "sample with a higher actor_rollout_ref.rollout.temperature.",
        WATCH,
        ("actor/entropy", SCORE),
        (entropy.steps[0], entropy.steps[-1]),
        run.samples(variance="zero"),
    )


def entropy_rises(run: RunView) -> Finding | None:
    entropy = run.series("actor/entropy")
    if len(entropy.values) < 2 * RECENT:
        return None
    begin, now = Series(entropy.steps[:5], entropy.values[:5]).mean(), entropy.last().mean()
    window = entropy.last(max(2 * RECENT, len(entropy.values) // 2))
    if now < 2 * begin or now < begin + 0.5 or not trend(window.values).is_rise:
        return None
    return Finding(
        "entropy_rises",
        "bad" if now > begin + 2 else "warning",
        "The entropy rises",
        f"It was {show(begin)} nats per token at the start, is {show(now)} now, and goes on rising: the policy becomes random.",
        "Lower actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.entropy_coeff, use a KL term "
        "(actor_rollout_ref.actor.use_kl_loss=true), and check that "
        "rollout and trainer agree (training/rollout_log_probs_gap).",
        WATCH,
        ("actor/entropy", "actor/kl_loss", SCORE),
        window.span,
        run.samples(sort="length"),
    )


def kl_rises(run: RunView) -> Finding | None:
    name = next((name for name in ("actor/kl_loss", "actor/reward_kl_penalty") if run.series(name).values), None)
    if name is None or len(run.series(name).values) < 2 * RECENT:
        return None
    kl = run.series(name)
    middle = statistics.median(kl.values[: len(kl.values) // 2 + 1])
    window, now = kl.last(max(2 * RECENT, len(kl.values) // 3)), kl.last().mean()
    if not trend(window.values).is_rise or now < 0.5 or now < 3 * middle:
        return None
    return Finding(
        "kl_rises",
        "bad" if now > 5 else "warning",
        "The policy runs away from the reference",
        f"The KL to the reference policy is {show(now)} nats per token in the last {RECENT} steps, "
        f"{show(now / max(middle, 1e-9))} times its median in "
        "the first half of the run, and rises.",
        "Raise actor_rollout_ref.actor.kl_loss_coef (or algorithm.kl_ctrl.kl_coef), lower actor_rollout_ref.actor.optim.lr, "
        "and read some responses: the reward may "
        "be satisfied by something else than right answers.",
        WATCH,
        (name, SCORE, "actor/entropy"),
        window.span,
        run.samples(sort="reward"),
    )


def updates_are_large(run: RunView) -> Finding | None:
    kl = run.series("actor/ppo_kl").last()
    if len(kl.values) < RECENT or statistics.median(kl.values) < 0.1:
        return None
    return Finding(
        "large_updates",
        "warning",
        "The policy moves far within a step",
        f"The KL between the policy that sampled and the one being updated is {show(kl.mean())} in the last {RECENT} steps "
        "(typical: below 0.02).",
        "Lower actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.ppo_epochs, or raise "
        "actor_rollout_ref.actor.ppo_mini_batch_size (fewer updates per step).",
        WATCH,
        ("actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm"),
        kl.span,
    )


def gradients_jump(run: RunView) -> Finding | None:
    name = next((name for name in ("actor/grad_norm", "train/grad_norm") if run.series(name).values), None)
    if name is None:
        return None
    recent = run.series(name).last(100)
    positive = [value for value in recent.values if value > 1e-8]
    if len(positive) < 20:
        return None
    usual = statistics.median(positive)
    key = "actor_rollout_ref.actor.grad_clip" if name.startswith("actor") else "optim.clip_grad"
    limit = max(10 * usual, 2 * (number(run.setting(key)) or 1.0))
    spikes = [(step, value) for step, value in zip(*recent) if value > limit]
    if len(spikes) < 2:
        return None
    highest = max(spikes, key=lambda spike: spike[1])
    learning_rate = "actor_rollout_ref.actor.optim.lr" if name.startswith("actor") else "optim.lr"
    return Finding(
        "gradient_spikes",
        "warning",
        "The gradient jumps",
        f"In {len(spikes)} of the last {len(recent.values)} steps its norm was more than 10 times the usual {show(usual)}; "
        f"at step {highest[0]} it was "
        f"{show(highest[1])}.",
        f"Lower {learning_rate} or {key}, or make batches larger; look at the samples of step {highest[0]} for odd ones "
        "(very long, odd scores).",
        WATCH,
        (name, "actor/ppo_kl", "actor/pg_clipfrac") if name.startswith("actor") else (name, "train/loss"),
        recent.span,
        run.samples(step=str(highest[0]), sort="length") if name.startswith("actor") else None,
    )


def numbers_are_not_finite(run: RunView) -> Finding | None:
    found = []
    for name in (
        "actor/grad_norm",
        "actor/pg_loss",
        "actor/entropy",
        "critic/vf_loss",
        SCORE,
        "train/loss",
        "train/grad_norm",
    ):
        series = run.read(name).last(50) if name in run.names else Series((), ())
        steps = [step for step, value in zip(*series) if not math.isfinite(value)]
        if steps:
            found.append((name, steps))
    if not found:
        return None
    name, steps = found[0]
    return Finding(
        "non_finite",
        "bad",
        "Numbers are not finite",
        f"{' and '.join(each for each, _ in found)} {'is' if len(found) == 1 else 'are'} NaN or infinite, first at step "
        f"{steps[0]}.",
        "Lower the learning rate (actor_rollout_ref.actor.optim.lr, or optim.lr), check that the reward function returns "
        "finite numbers, and resume from a "
        f"checkpoint before step {steps[0]}.",
        "troubleshooting.md",
        tuple(each for each, _ in found),
        (steps[0], steps[-1]),
    )


def critic_explains_nothing(run: RunView) -> Finding | None:
    explained = run.series("critic/vf_explained_var")
    warmup = int(number(run.setting("trainer.critic_warmup")) or 0)
    recent = explained.last(20)
    if len(explained.values) < max(30, warmup + 20) or statistics.median(recent.values) > -0.05:
        return None
    return Finding(
        "critic",
        "warning",
        "The critic predicts worse than a constant",
        f"critic/vf_explained_var is {show(statistics.median(recent.values))} (median of the last {len(recent.values)} "
        "steps); 0 would be a constant, 1 perfect.",
        "Give it time first (trainer.critic_warmup), raise critic.optim.lr, start it from the policy's model "
        "(critic.model.path), or use an estimator "
        "without a critic (algorithm.adv_estimator=grpo).",
        WATCH,
        ("critic/vf_explained_var", "critic/vf_loss"),
        recent.span,
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


def supervised_loss(run: RunView) -> Finding | None:
    """Flat training loss, or validation loss that rises (SFT, reward models, DPO)."""
    validation, loss = run.series("val/loss"), run.series("train/loss")
    if len(validation.values) >= 4:
        best = min(validation.values)
        at = validation.steps[list(validation.values).index(best)]
        last = validation.values[-2:]
        if at < validation.steps[-2] and min(last) > best + max(0.02 * abs(best), 2 * noise(loss.values) / 10):
            return Finding(
                "overfitting",
                "warning",
                "The validation loss rises",
                f"val/loss was {show(best)} at step {at} and is {show(last[-1])} now: the model overfits the training rows.",
                "Stop at the best checkpoint, lower trainer.total_epochs or optim.lr, use more data, or train adapters "
                "(model.lora_rank).",
                "sft.md",
                ("val/loss", "train/loss"),
                (at, validation.steps[-1]),
            )
    if len(loss.values) < 50:
        return None
    change, error = trend(loss.values)
    start = Series(loss.steps[:5], loss.values[:5]).mean()
    if abs(change) + 2 * error > 0.03 * abs(start) or start < 0.05:
        return None
    if start - loss.last().mean() > 0.03 * start:  # it fell early, and rests
        return None
    return Finding(
        "loss_flat",
        "warning",
        "The loss does not fall",
        f"From step {loss.steps[0]} to {loss.steps[-1]} train/loss changed by {show(change)} (± {show(2 * error)}); it began "
        f"at {show(start)}.",
        "Raise optim.lr, and check that the loss is computed on the right tokens (data.* of the prompt and response columns, "
        "the chat template).",
        "sft.md",
        ("train/loss", "train/grad_norm", "train/lr"),
        loss.span,
    )


RULES: tuple[Callable[[RunView], Finding | None], ...] = (
    numbers_are_not_finite,
    reward_is_not_accuracy,
    reward_is_constant,
    reward_falls,
    reward_is_flat,
    groups_are_equal,
    reward_is_saturated,
    entropy_collapses,
    entropy_rises,
    kl_rises,
    updates_are_large,
    gradients_jump,
    validation_falls,
    critic_explains_nothing,
    supervised_loss,
)
