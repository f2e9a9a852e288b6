"""Whether the samples are good to train on: cut or empty responses, tools, the reward function, the rollout's log-probs,
staleness."""

import statistics
from collections.abc import Callable

from lockstep.observability.health.run_view import RECENT, WATCH, Finding, RunView, Series, percent, show, trend
from lockstep.observability.numbers import number

FEW = 3
"""Steps that a share needs to be called one."""


def responses_are_cut(run: RunView) -> Finding | None:
    cut = run.series("response_length/clip_ratio").last()
    if len(cut.values) < FEW or cut.mean() < 0.1:
        return None
    limit, length = run.setting("data.max_response_length"), run.series("response_length/mean").last()
    mean = f", at a mean length of {show(length.mean())}" if length.values else ""
    return Finding(
        "responses_cut",
        "bad" if cut.mean() >= 0.3 else "warning",
        f"{percent(cut.mean())} of the responses are cut",
        f"In the last {len(cut.values)} steps {percent(cut.mean())} of the responses reached data.max_response_length"
        f"{f'={limit}' if limit else ''}{mean}: their answers may be missing.",
        "Raise data.max_response_length (and check the memory by `lockstep plan`), ask for short answers in the prompt, or "
        "penalise length in the reward.",
        WATCH,
        ("response_length/clip_ratio", "response_length/mean", "critic/score/mean"),
        cut.span,
        run.samples(stop="length"),
    )


def responses_are_empty(run: RunView) -> Finding | None:
    empty = run.series("response/aborted_ratio").last()
    if len(empty.values) < FEW or empty.mean() < 0.1:
        return None
    return Finding(
        "responses_empty",
        "warning",
        f"{percent(empty.mean())} of the responses are empty",
        f"In the last {len(empty.values)} steps {percent(empty.mean())} of the responses had no token: they are not trained on.",
        "Check that prompts fit (data.max_prompt_length), that the chat template ends with the assistant's turn, and that "
        "the rollout does not abort "
        "requests (its log).",
        "rollout.md",
        ("response/aborted_ratio", "response_length/min"),
        empty.span,
        run.samples(sort="length", order="asc"),
    )


def tools_fail(run: RunView) -> Finding | None:
    calls, errors = run.series("tool_call_counts/mean").last(), run.series("tool_error_counts/mean").last()
    if len(calls.values) < FEW or len(errors.values) < FEW or calls.mean() < 0.02:
        return None
    share = errors.mean() / calls.mean()
    if share < 0.1:
        return None
    return Finding(
        "tools_fail",
        "bad" if share >= 0.3 else "warning",
        f"{percent(min(share, 1.0))} of the tool calls fail",
        f"In the last {len(calls.values)} steps a conversation made {show(calls.mean())} tool calls, of which "
        f"{show(errors.mean())} failed: the policy got an "
        "error message instead of a result.",
        "The log has the first error of each kind; look at failing conversations: is it the tool (service down, time-out, "
        "rate limit) or what the "
        "policy asks of it (wrong arguments: improve the tool's description)?",
        "tools.md",
        ("tool_error_counts/mean", "tool_call_counts/mean", "critic/score/mean"),
        calls.span,
        run.samples(problem="tool_error"),
    )


def calls_are_malformed(run: RunView) -> Finding | None:
    """Calls that cannot be parsed are what an untrained policy writes; only if that lasts."""
    calls, malformed = run.series("tool_call_counts/mean").last(), run.series("malformed_call_counts/mean")
    recent = malformed.last()
    if len(malformed.values) < 2 * RECENT or not calls.values or recent.mean() < 0.05:
        return None
    share = recent.mean() / max(calls.mean() + recent.mean(), 1e-9)
    if share < 0.15 or trend(malformed.last(4 * RECENT).values).is_fall:
        return None
    return Finding(
        "malformed_calls",
        "warning",
        f"{percent(share)} of the tool calls cannot be read",
        f"In the last {len(recent.values)} steps a conversation had {show(recent.mean())} calls that could not be parsed or "
        "name no tool.",
        "Check that the model writes calls in the format of the parser (actor_rollout_ref.rollout.multi_turn.format), show "
        "an example in the prompt, or train "
        "the format by supervised fine-tuning first.",
        "tools.md",
        ("malformed_call_counts/mean", "tool_call_counts/mean"),
        recent.span,
        run.samples(problem="tool_error"),
    )


def conversations_fail(run: RunView) -> Finding | None:
    for name, what, page in (
        ("program_error_counts", "program", "agents.md"),
        ("environment_error_counts", "environment", "environments.md"),
    ):
        errors = run.series(f"{name}/mean").last()
        if len(errors.values) >= FEW and errors.mean() >= 0.05:
            return Finding(
                "conversations_fail",
                "bad" if errors.mean() >= 0.3 else "warning",
                f"The {what} fails in {percent(errors.mean())} of the conversations",
                f"In the last {len(errors.values)} steps the {what} of {percent(errors.mean())} of the conversations ended "
                "with an error.",
                f"The log has the first error of each kind. Run the {what} by itself on one of these prompts.",
                page,
                (f"{name}/mean", "critic/score/mean"),
                errors.span,
                run.samples(sort="reward", order="asc"),
            )
    return None


def reward_function_fails(run: RunView) -> Finding | None:
    failed = run.series("reward/reward_failed/mean").last()
    if not failed.values or failed.mean() < 0.005:
        return None
    return Finding(
        "reward_fails",
        "bad" if failed.mean() >= 0.1 else "warning",
        f"The reward function fails for {percent(failed.mean())} of the responses",
        f"In the last {len(failed.values)} steps scoring raised an error or exceeded its time for {percent(failed.mean())} "
        "of the responses; they scored 0.",
        "The log has the error and the line of your function. Handle odd answers there, or raise reward_model.timeout_s.",
        "rewards.md",
        ("reward/reward_failed/mean", "critic/score/mean"),
        failed.span,
        run.samples(problem="reward_failed"),
    )


def log_probs_differ(run: RunView) -> Finding | None:
    """Rollout and trainer disagree more and more. In an asynchronous run they always differ: its samples are of older policies."""
    gap = run.series("training/rollout_log_probs_gap")
    if len(gap.values) < 2 * RECENT:
        return None
    begin, now = statistics.median(gap.values[:RECENT]), statistics.median(gap.last().values)
    least = 0.2 if run.setting("trainer.async_mode") else 0.03
    if now < max(least, 2 * begin) or not trend(gap.last(max(2 * RECENT, len(gap.values) // 2)).values).is_rise:
        return None
    return Finding(
        "log_prob_gap",
        "bad" if now > 10 * least else "warning",
        "Rollout and trainer drift apart",
        f"The mean gap between their log-probs was {show(begin)} in the first {RECENT} steps and is {show(now)} now.",
        "Correct it by importance weights (algorithm.rollout_correction.rollout_is=token), compute in a higher precision, or "
        "keep samples younger "
        "(trainer.max_staleness).",
        "algorithms.md",
        ("training/rollout_log_probs_gap", "rollout_corr/kl", "actor/entropy"),
        (gap.steps[0], gap.steps[-1]),
    )


def pools_wait(run: RunView) -> Finding | None:
    """One half of an asynchronous run waits for the other."""
    trainer, rollout = (run.series(f"async/{side}_wait_share").last() for side in ("trainer", "rollout"))
    if len(trainer.values) < RECENT or len(rollout.values) < RECENT:
        return None
    for waits, other, share, advice in (
        ("training", "samples", trainer, "Give the rollout more GPUs, or raise trainer.max_staleness"),
        ("the rollout", "training", rollout, "Give training more GPUs, or raise trainer.max_staleness"),
    ):
        if share.mean() >= 0.5:
            side = "trainer" if share is trainer else "rollout"
            return Finding(
                "pool_waits",
                "info",
                f"{waits.capitalize()} waits for {other} {percent(share.mean())} of the time",
                f"In the last {RECENT} steps {waits} stood still for {percent(share.mean())} of the time, waiting for {other}.",
                f"{advice}; docs/async_training.md says which pool to enlarge.",
                "async_training.md",
                (f"async/{side}_wait_share", "async/queue_length", "async/staleness/mean"),
                share.span,
            )
    return None


def samples_are_dropped(run: RunView) -> Finding | None:
    stale = run.series("async/stale_groups").last()
    batch = number(run.setting("data.train_batch_size"))
    if len(stale.values) < FEW or not batch or stale.mean() < 0.2 * batch:
        return None
    staleness: Series = run.series("async/staleness/mean").last()
    return Finding(
        "stale_samples",
        "warning",
        "Many samples are dropped as too old",
        f"In the last {len(stale.values)} steps {show(stale.mean())} groups per step were dropped because of "
        f"trainer.max_staleness, beside the {show(batch)} that "
        f"were trained on{f'; mean staleness {show(staleness.mean())}' if staleness.values else ''}.",
        "Raise trainer.max_staleness, set trainer.stale_samples=wait, or shorten the longest responses "
        "(data.max_response_length).",
        "async_training.md",
        ("async/stale_groups", "async/staleness/mean", "async/queue_length"),
        stale.span,
    )


RULES: tuple[Callable[[RunView], Finding | None], ...] = (
    responses_are_cut,
    tools_fail,
    calls_are_malformed,
    conversations_fail,
    reward_function_fails,
    responses_are_empty,
    log_probs_differ,
    pools_wait,
    samples_are_dropped,
)
