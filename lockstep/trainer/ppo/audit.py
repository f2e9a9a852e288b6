"""Cheap checks on every step: a run that would silently train wrongly stops instead."""

import logging

import torch

from lockstep.agents.trajectory import NOT_SAMPLED
from lockstep.config.actor_rollout_ref import has_cut_log_probs
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto
from lockstep.protocol.tokens import entries, read, row_chunks, shape_of
from lockstep.utils.audit import AuditError, Audits, GapBound, RolloutGap
from lockstep.utils.metrics import reduced_over_ranks

logger = logging.getLogger(__name__)


def check_finite(batch: DataProto, *keys: str) -> None:
    """AuditError if a value that the losses read is not finite at an unmasked position."""
    for key in keys:
        if key not in batch.tensors:
            continue
        values, mask = entries(batch.tensors, key, "response_mask")
        if not torch.isfinite(values).all() and not torch.isfinite(values[mask.bool()]).all():
            bad = ~torch.isfinite(read(batch.tensors, key)) & read(batch.tensors, "response_mask").bool()
            rows = bad.any(-1).nonzero().flatten().tolist()
            raise AuditError(
                f"batch key {key!r} is not finite in {len(rows)} of {len(batch)} rows, first row {rows[0]}"
            )


class IdleSteps:
    """Counts consecutive steps in which every advantage is zero, so that the policy loss has no gradient."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, batch: DataProto) -> None:
        """Warn at the 1st, 2nd, 4th, 8th … such step."""
        advantages, mask = entries(batch.tensors, "advantages", "response_mask")
        useful = bool((advantages * mask).any())
        self.count = 0 if useful else self.count + 1
        if self.count.bit_count() == 1:
            logger.warning(
                "every advantage is zero for %d step(s): all samples of a prompt score the same, so nothing is learned. "
                "Are the prompts too hard or too easy, or does the scorer not see the answer?",
                self.count,
            )


class FailedConversations:
    """Counts consecutive steps in which every conversation failed, or tools and interactions as often as they were called."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, batch: DataProto) -> None:
        """Warn at the 1st, 2nd, 4th, 8th … such step."""
        columns = batch.non_tensor_batch
        if "tool_call_counts" not in columns:
            return
        holders_fail = all(columns["program_error_counts"] + columns["environment_error_counts"])
        num_calls, num_errors = sum(columns["tool_call_counts"]), sum(columns["tool_error_counts"])
        tools_fail = num_errors >= (num_calls or len(batch))  # without calls, errors are of interactions
        self.count = self.count + 1 if holders_fail or tools_fail else 0
        if self.count.bit_count() == 1:
            what = "the program or environment of every conversation failed"
            if not holders_fail:
                what = f"{num_errors} errors of tools, their rewards and interactions, in {num_calls} tool calls,"
            logger.warning("%s for %d step(s); the first error of each kind is in the log", what, self.count)


class CutResponses:
    """Counts consecutive steps in which every response was cut at the maximum length, so that no answer is complete."""

    def __init__(self) -> None:
        self.count = 0
        self.has_warned = False

    def note(self, batch: DataProto) -> None:
        """Warn at the second such step, once per run."""
        is_cut = [reason == "length" for reason in batch.non_tensor_batch["finish_reason"]]
        self.count = self.count + 1 if all(is_cut) else 0
        if self.count > 1 and not self.has_warned:
            self.has_warned = True
            has_tools = any(batch.non_tensor_batch.get("tool_call_counts", ()))
            logger.warning(
                "every response was cut at data.max_response_length=%d%s for %d steps: none ends by itself, and most scorers find "
                "no answer. Raise data.max_response_length, or check that the model and its chat template have an end token",
                shape_of(batch.tensors, "responses")[1],
                ", which includes the answers of tools," if has_tools else "",
                self.count,
            )


class StepAudit:
    """The checks of a step that remember earlier steps.

    audits: what becomes of what they find.
    dtype:  the actor's compute type.
    """

    def __init__(self, audits: Audits, dtype: torch.dtype) -> None:
        self.audits = audits
        self.gap_bound = GapBound(dtype)
        self.cut_responses = CutResponses()
        self.failed_conversations = FailedConversations()
        self.idle_steps = IdleSteps()

    def note_samples(self, batch: DataProto) -> None:
        self.cut_responses.note(batch)
        self.failed_conversations.note(batch)

    def check_advantages(self, batch: DataProto) -> None:
        self.idle_steps.note(batch)
        check_finite(batch, "old_log_probs", "ref_log_prob", "values", "token_level_rewards", "advantages", "returns")


def max_staleness(config: PPOConfig) -> int:
    """Updates that the policy of a sample may be behind the trainer's."""
    return 0 if config.trainer.async_mode is None else config.trainer.max_staleness


def is_gap_expected(config: PPOConfig) -> bool:
    """Whether the rollout's probabilities may differ from the trainer's: because they are corrected for, stale, or cut."""
    correction = config.algorithm.rollout_correction
    corrected = correction.rollout_is is not None or correction.rollout_rs is not None
    return corrected or max_staleness(config) > 0 or has_cut_log_probs(config.actor_rollout_ref.rollout)


def check_policy_version(batch: DataProto, current: int, max_staleness: int = 0) -> None:
    """AuditError unless every sequence was generated by the current policy, or at most `max_staleness` updates earlier."""
    versions = set(batch.tensors["policy_version"].tolist()) - {NOT_SAMPLED}
    if not all(current - max_staleness <= version <= current for version in versions):
        allowed = f"; at most {max_staleness} updates earlier are allowed" if max_staleness else ""
        raise AuditError(f"rollouts carry policy versions {sorted(versions)}, the trainer is at {current}{allowed}")


def rollout_gap(batch: DataProto, bound: GapBound, *, is_expected: bool = False) -> dict[str, float]:
    """Metrics of the distance between the rollout's probabilities and the trainer's; AuditError if it exceeds the bound.

    is_expected: it is corrected for, or of stale or cut samples, so it is only reported.
    """
    if "rollout_log_probs" not in batch.tensors:
        return {}
    gap = RolloutGap()
    for part in row_chunks(batch.tensors):
        names = ("rollout_log_probs", "old_log_probs", "response_mask")
        routes = ("route_mismatch",) if "route_mismatch" in part else ()
        gap.add(*entries(part, *names, *routes))
    metrics = reduced_over_ranks(gap.metrics(*gap.sums()))
    if not is_expected:
        bound.check(metrics)
    return metrics
