"""Cheap checks on every step: a run that would silently train wrongly stops instead (docs/audits.md).

    samples ─► data order, policy versions, token round trip ─► log-probs ─► gap ─► advantages ─► update ─► what the workers found

What an audit finds goes through `Audits.found`; the batch is kept in the run's folder (`batch_dump.py`).
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from lockstep.agents.trajectory import NOT_SAMPLED
from lockstep.config.actor_rollout_ref import has_cut_log_probs, max_expected_gap
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto
from lockstep.protocol.columns import Batch
from lockstep.protocol.tokens import entries, read, row_chunks, shape_of
from lockstep.trainer.ppo.batch_dump import DumpInfo, checkpoint_name, write_dump
from lockstep.trainer.ppo.data_order import DrawnPrompts
from lockstep.trainer.ppo.reward_probe import RewardProbe
from lockstep.trainer.ppo.round_trip import RoundTrip
from lockstep.utils.audit import AuditError, Audits
from lockstep.utils.metrics import reduced_over_ranks
from lockstep.utils.rollout_gap import GapBound, RolloutGap

logger = logging.getLogger(__name__)


def check_finite(audits: Audits, batch: DataProto, *keys: str) -> None:
    """Whether the values that the losses read are finite at unmasked positions."""
    for key in keys:
        if key not in batch.tensors:
            continue
        values, mask = entries(batch.tensors, key, "response_mask")
        if not torch.isfinite(values).all() and not torch.isfinite(values[mask.bool()]).all():
            bad = ~torch.isfinite(read(batch.tensors, key)) & read(batch.tensors, "response_mask").bool()
            rows = bad.any(-1).nonzero().flatten().tolist()
            audits.found(
                "finite", f"batch key {key!r} is not finite in {len(rows)} of {len(batch)} rows, first row {rows[0]}"
            )


def check_spread(audits: Audits, batch: DataProto) -> None:
    """Whether advantages are neither all zero, so that the policy loss has no gradient, nor all the same number."""
    advantages, mask = entries(batch.tensors, "advantages", "response_mask")
    is_token = mask.bool()
    lowest = float(advantages.masked_fill(~is_token, torch.inf).min())
    highest = float(advantages.masked_fill(~is_token, -torch.inf).max())
    if lowest == highest == 0 or lowest > highest:  # without a token
        audits.found(
            "advantages",
            "every advantage is zero: all samples of a prompt score the same, so nothing is learned. Are the prompts too hard or "
            "too easy, or does the scorer not see the answer?",
        )
    elif lowest == highest and len(batch) > 1:
        audits.found(
            "advantages",
            f"every advantage is {lowest:.4g}: good and bad responses are trained alike. Is the score constant, or is its baseline "
            "missing (algorithm.adv_estimator, rollout.n)?",
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
    """The audits of a step on the controller.

    audits:  what becomes of what they find.
    gap_bound: of the distance between the log-probs of rollout and trainer.
    folder:  of the run, in which batches are kept.
    write_rows: writes the responses of a batch into a folder, as text.
    keeps_batches: whether the batch of a finding is kept.
    """

    def __init__(
        self,
        audits: Audits,
        gap_bound: GapBound,
        folder: Path,
        prompts: DrawnPrompts,
        round_trip: RoundTrip,
        probe: RewardProbe,
        write_rows: Callable[[DataProto, Path], None],
    ) -> None:
        self.audits = audits
        self.folder = folder
        self.prompts = prompts
        self.round_trip = round_trip
        self.probe = probe
        self.write_rows = write_rows
        self.gap_bound = gap_bound
        self.cut_responses = CutResponses()
        self.failed_conversations = FailedConversations()
        self.keeps_batches = True
        self.batch: DataProto | None = None
        """The batch of the step, as far as it is."""
        self._at = DumpInfo("", "", 0, 0, None)
        self._began = time.monotonic()

    @contextmanager
    def step(self, step: int, num_updates: int, checkpoint: Path | None) -> Iterator[None]:
        """Inside, a step is computed; if an audit ends it, its batch is kept, and the error says where.

        num_updates: before the step. checkpoint: the newest one.
        """
        self._at = DumpInfo("", "", step, num_updates, checkpoint_name(self.folder, checkpoint))
        self.batch = None
        self._began = time.monotonic()
        try:
            yield
        except AuditError as error:
            if error.audit is None or not (kept := self._keep(error.audit, str(error))):
                raise
            told = AuditError(f"{error}. {kept}")
            told.audit = error.audit
            raise told from error

    def log(self) -> dict[str, float]:
        """At the end of a step: warn of what was found, keep its batch. Returns metrics."""
        metrics = self.audits.log(self._keep)
        self.batch = None
        return metrics

    def _keep(self, audit: str, message: str) -> str:
        """Keep the batch; returns a sentence that says where, or an empty string."""
        is_common = audit == "advantages" and self.audits.levels.get(audit) == "warn"  # on hard data
        if self.batch is None or is_common or not self.keeps_batches:
            return ""
        info = replace(self._at, audit=audit, message=message)
        kept = write_dump(self.folder, self.batch, info, self.write_rows)
        if kept is None:
            return ""
        return (
            f"The step's batch is kept: `lockstep rollouts {kept}` shows it, `lockstep replay {kept}` computes it again"
        )

    def check_samples(self, batch: DataProto) -> None:
        """The scored samples of the step, one row per conversation."""
        self.batch = batch
        self.cut_responses.note(batch)
        self.failed_conversations.note(batch)
        if self.audits.checks("data_order"):
            self.prompts.check(self.audits, batch)
        if self.audits.checks("token_round_trip"):
            self.round_trip.check(self.audits, batch, self._at.step)
        if self.audits.checks("reward_probe"):
            self.probe.check(self.audits, batch, self._at.step, time.monotonic() - self._began)

    def check_versions(self, batch: DataProto, num_updates: int, max_staleness: int) -> None:
        """num_updates: the trainer's policy version."""
        self.batch = batch
        if self.audits.checks("policy_version"):
            check_policy_version(self.audits, batch, num_updates, max_staleness)

    def check_gap(self, batch: DataProto, *, is_expected: bool) -> dict[str, float]:
        self.batch = batch
        return rollout_gap(self.audits, batch, self.gap_bound, is_expected=is_expected)

    def check_advantages(self, batch: DataProto) -> None:
        self.batch = batch
        if self.audits.checks("advantages"):
            check_spread(self.audits, batch)
        if self.audits.checks("finite"):
            names = ("old_log_probs", "ref_log_prob", "values", "token_level_rewards", "advantages", "returns")
            check_finite(self.audits, batch, *names)


def max_staleness(config: PPOConfig) -> int:
    """Updates that the policy of a sample may be behind the trainer's."""
    return 0 if config.trainer.async_mode is None else config.trainer.max_staleness


def is_gap_expected(config: PPOConfig) -> bool:
    """Whether the rollout's probabilities may differ from the trainer's by any amount: because they are corrected for, stale, or
    cut. The gap of a rollout in 8 bits has its own bound, although it is corrected for."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    corrected = correction.rollout_is is not None or correction.rollout_rs is not None
    corrected &= max_expected_gap(rollout) is None
    return corrected or max_staleness(config) > 0 or has_cut_log_probs(rollout)


def check_policy_version(audits: Audits, batch: DataProto, current: int, max_staleness: int = 0) -> None:
    """Whether the current policy sampled every token, or one at most `max_staleness` updates older, and none after a newer one."""
    versions = set(batch.tensors["policy_version"].tolist()) - {NOT_SAMPLED}
    falls = None
    if "policy_versions" in batch.tensors:
        (of_tokens,) = entries(batch.tensors, "policy_versions")
        if not bool(((of_tokens == NOT_SAMPLED) | (of_tokens == current)).all()):
            versions |= set(of_tokens.unique().tolist()) - {NOT_SAMPLED}
            falls = next((row for part in row_chunks(batch.tensors) if (row := _first_fall(part)) is not None), None)
    if not all(current - max_staleness <= version <= current for version in versions):
        allowed = f"; at most {max_staleness} updates earlier are allowed" if max_staleness else ""
        audits.found(
            "policy_version",
            f"rollouts carry policy versions {sorted(versions)}, the trainer is at {current}{allowed}",
        )
    elif falls is not None:
        audits.found(
            "policy_version", f"a response has tokens of an older policy after those of a newer one: versions {falls}"
        )


def _first_fall(rows: Batch) -> list[int] | None:
    """The versions of the sampled tokens, in the order they change, of a row in which they decrease; None without one."""
    versions = read(rows, "policy_versions")
    newest = versions.cummax(1).values
    falls = ((versions < newest) & (versions != NOT_SAMPLED)).any(1)
    if not falls.any():
        return None
    found = versions[int(falls.nonzero()[0, 0])]
    return [version for version, _ in groupby(v for v in found.tolist() if v != NOT_SAMPLED)]


def rollout_gap(audits: Audits, batch: DataProto, bound: GapBound, *, is_expected: bool = False) -> dict[str, float]:
    """Metrics of the distance between the rollout's probabilities and the trainer's; it must not exceed the bound.

    is_expected: it is corrected for, or of stale or cut samples, so it is only reported.
    """
    if "rollout_log_probs" not in batch.tensors:
        return {}
    gap = RolloutGap()
    for part in row_chunks(batch.tensors):
        mismatch: Tensor | None = read(part, "route_mismatch") if "route_mismatch" in part else None
        gap.add(read(part, "rollout_log_probs"), read(part, "old_log_probs"), read(part, "response_mask"), mismatch)
    sums = gap.sums()
    if not is_expected and (problem := bound.problem(sums)) is not None:
        audits.found("rollout_gap", problem)
    return reduced_over_ranks(gap.metrics(sums))
