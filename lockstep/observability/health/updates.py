"""Whether the updates are sound: finite numbers, entropy, KL, gradients, the critic, the loss on a fixed dataset."""

import math
import statistics
from collections.abc import Callable

from lockstep.observability.health.reward import SCORE, is_saturated, score_range
from lockstep.observability.health.run_view import RECENT, WATCH, Finding, RunView, Series, noise, show, trend
from lockstep.observability.numbers import number


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
    entropy_collapses,
    entropy_rises,
    kl_rises,
    updates_are_large,
    gradients_jump,
    critic_explains_nothing,
    supervised_loss,
)
