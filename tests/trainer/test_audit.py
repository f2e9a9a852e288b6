"""The audits find what they are there for."""

import pickle

import numpy as np
import pytest
import torch

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.audit import (
    AuditError,
    CutResponses,
    FailedConversations,
    check_finite,
    check_policy_version,
    check_spread,
    rollout_gap,
)
from lockstep.utils.audit import Audits
from lockstep.utils.rollout_gap import GapBound, RolloutGap
from tests.tiny import random_batch


@pytest.fixture
def batch() -> DataProto:
    rows = random_batch()
    rows["rollout_log_probs"] = rows["old_log_probs"] + 0.01
    rows["policy_version"] = torch.full((len(rows),), 3)
    return DataProto(batch=rows)


def test_a_number_that_is_not_finite_is_named_with_its_row(batch: DataProto) -> None:
    check_finite(Audits({}), batch, "advantages", "values", "not_there")
    batch.tensors["advantages"][4, 0] = float("nan")
    with pytest.raises(AuditError, match="'advantages' is not finite in 1 of 6 rows, first row 4"):
        check_finite(Audits({}), batch, "values", "advantages")


def test_a_masked_place_may_hold_anything(batch: DataProto) -> None:
    batch.tensors["advantages"][:, 2] = float("inf")
    check_finite(Audits({}), batch, "advantages")


def test_levels_decide_what_becomes_of_a_finding(batch: DataProto) -> None:
    batch.tensors["values"][0, 0] = float("nan")
    with pytest.raises(AuditError) as stopped:
        check_finite(Audits({"finite": "stop"}), batch, "values")
    assert pickle.loads(pickle.dumps(stopped.value)).audit == "finite"  # from a worker's process
    audits = Audits({"finite": "warn"})
    check_finite(audits, batch, "values")
    assert audits.log(lambda name, message: f"; {name} is kept") == {"audit/finite": 1.0}
    silent = Audits({"finite": "off"})
    check_finite(silent, batch, "values")
    assert silent.log() == {}


def test_rollouts_of_another_policy_version(batch: DataProto) -> None:
    check_policy_version(Audits({}), batch, 3)
    batch.tensors["policy_version"][1] = 2
    with pytest.raises(
        AuditError,
        match=r"versions \[2, 3\], the trainer is at 3 \(audit policy_version;",
    ):
        check_policy_version(Audits({}), batch, 3)


def test_staleness_is_bounded(batch: DataProto) -> None:
    batch.tensors["policy_version"][1] = 1
    check_policy_version(Audits({}), batch, 3, max_staleness=2)
    with pytest.raises(AuditError, match=r"versions \[1, 3\], the trainer is at 3; at most 1 updates earlier"):
        check_policy_version(Audits({}), batch, 3, max_staleness=1)
    with pytest.raises(AuditError, match="the trainer is at 2"):
        check_policy_version(Audits({}), batch, 2, max_staleness=4)


def test_versions_of_tokens(batch: DataProto) -> None:
    audits = Audits({"policy_version": "warn"})
    versions = torch.full(batch.tensors["responses"].shape, 3)
    versions[0, :4] = torch.tensor([2, -1, 2, 3])
    batch.tensors["policy_versions"] = versions
    check_policy_version(audits, batch, 3, max_staleness=1)
    assert not audits.take_findings()
    versions[0, 3] = 1
    check_policy_version(audits, batch, 3, max_staleness=2)
    assert audits.take_findings()["policy_version"].endswith("after those of a newer one: versions [2, 1, 3]")
    versions[0, 3] = 4
    check_policy_version(audits, batch, 3, max_staleness=2)
    assert "versions [2, 3, 4], the trainer is at 3" in audits.take_findings()["policy_version"]


def gap_of(batch: DataProto, bound: GapBound, gap: float, **options: bool) -> float:
    batch.tensors["rollout_log_probs"] = batch.tensors["old_log_probs"] + gap
    return rollout_gap(Audits({}), batch, bound, **options)["training/rollout_log_probs_gap"]


def test_a_gap_beyond_the_type_stops_the_run_and_is_named(batch: DataProto) -> None:
    message = (
        r"differ from the trainer's by 0\.0500 per token on average; the bound for float32 is 0\.0100 at the first step\. "
        r".*weights are not in sync.*temperature.*forwards differ.*algorithm\.rollout_correction\.rollout_is"
    )
    with pytest.raises(AuditError, match=message):
        gap_of(batch, GapBound(torch.float32), 0.05)
    for dtype in (torch.bfloat16, torch.float16):
        assert gap_of(batch, GapBound(dtype), 0.02) == pytest.approx(0.02, abs=1e-4)
        with pytest.raises(AuditError, match=f"the bound for {str(dtype)[6:]} is 0.1000"):
            gap_of(batch, GapBound(dtype), 0.2)
    with pytest.raises(AuditError, match="by nan"):
        gap_of(batch, GapBound(torch.bfloat16), float("nan"))


def test_the_bound_follows_the_first_step(batch: DataProto) -> None:
    bound = GapBound(torch.bfloat16)
    gap_of(batch, bound, 0.02)
    gap_of(batch, bound, 0.07)
    gap_of(batch, bound, 0.001)
    with pytest.raises(AuditError, match=r"bound for bfloat16 is 0\.0800\. Likely"):
        gap_of(batch, bound, 0.09)
    exact = GapBound(torch.float32)
    gap_of(batch, exact, 0.0)
    gap_of(batch, exact, 0.0009)
    with pytest.raises(AuditError, match=r"bound for float32 is 0\.0010"):
        gap_of(batch, exact, 0.002)


def test_the_bound_of_a_rollout_in_8_bits_is_its_key(batch: DataProto) -> None:
    bound = GapBound(torch.float32, largest=0.2)
    gap_of(batch, bound, 0.02)
    gap_of(batch, bound, 0.07)
    with pytest.raises(
        AuditError, match=r"in 8 bits .* by 0\.0900 .* is 0\.0800 \(four times that of the first step\)"
    ):
        gap_of(batch, bound, 0.09)
    small = GapBound(torch.float32, largest=0.2)
    gap_of(batch, small, 0.003)
    with pytest.raises(AuditError, match=r"is 0\.0500 \(a quarter of quantization_max_gap\)"):
        gap_of(batch, small, 0.06)
    wide = GapBound(torch.bfloat16, largest=0.2)
    gap_of(batch, wide, 0.15)
    with pytest.raises(
        AuditError, match=r"bound is 0\.2000\. .* raise actor_rollout_ref\.rollout\.quantization_max_gap"
    ):
        gap_of(batch, wide, 0.25)


def test_a_corrected_gap_is_reported_and_sets_no_bound(batch: DataProto) -> None:
    bound = GapBound(torch.float32)
    assert gap_of(batch, bound, 1.0, is_expected=True) == pytest.approx(1.0, abs=1e-3)
    assert bound.bound is None
    assert bound.problem(RolloutGap().sums()) is None  # no token
    assert bound.bound is None


def test_steps_that_teach_nothing_are_told(batch: DataProto, caplog: pytest.LogCaptureFixture) -> None:
    audits = Audits({"advantages": "warn"})
    check_spread(audits, batch)
    assert audits.log() == {} and not caplog.messages
    batch.tensors["advantages"] *= 1 - batch.tensors["response_mask"]
    for number in range(1, 6):
        check_spread(audits, batch)
        assert audits.log() == {"audit/advantages": number}
    assert [m.split(": all")[0] for m in caplog.messages] == [
        f"audit advantages{times}: every advantage is zero"
        for times in ("", " (in 2 steps so far)", " (in 4 steps so far)")
    ]
    batch.tensors["advantages"] += 0.5
    check_spread(audits, batch)
    assert audits.take_findings()["advantages"].startswith("every advantage is 0.5: good and bad")
    batch.tensors["advantages"][0] += 0.1
    check_spread(audits, batch)
    assert not audits.take_findings()


def test_steps_whose_every_response_is_cut_are_told(batch: DataProto, caplog: pytest.LogCaptureFixture) -> None:
    cut, width = CutResponses(), batch.tensors["responses"].shape[1]
    reasons = batch.non_tensor_batch["finish_reason"] = np.array(["length"] * len(batch), dtype=object)
    reasons[-1] = "stop"
    cut.note(batch)
    cut.note(batch)
    assert cut.count == 0 and not caplog.records  # a response ends by itself
    reasons[-1] = "length"  # of agents: also if a message of a tool did not fit, and the response is shorter
    cut.note(batch)
    assert not caplog.records
    cut.note(batch)
    assert f"every response was cut at data.max_response_length={width} for 2 steps" in caplog.text
    for _ in range(8):
        cut.note(batch)
    assert len(caplog.records) == 1  # once per run
    reasons[0] = "turns"
    cut.note(batch)
    assert cut.count == 0
    cut = CutResponses()
    reasons[0], batch.non_tensor_batch["tool_call_counts"] = "length", np.array([1] * len(batch), dtype=object)
    cut.note(batch)
    cut.note(batch)
    assert f"={width}, which includes the answers of tools, for 2 steps" in caplog.text


def test_steps_in_which_everything_around_the_policy_fails_are_told(
    batch: DataProto, caplog: pytest.LogCaptureFixture
) -> None:
    failed, columns = FailedConversations(), batch.non_tensor_batch
    failed.note(batch)  # no conversations
    for name in ("tool_call_counts", "tool_error_counts", "program_error_counts", "environment_error_counts"):
        columns[name] = np.array([0] * len(batch), dtype=object)
    failed.note(batch)  # no calls
    columns["tool_call_counts"][:2], columns["tool_error_counts"][0] = 1, 1
    failed.note(batch)  # one of two calls succeeds
    assert not caplog.messages
    columns["tool_error_counts"][1] = 1
    failed.note(batch)
    columns["program_error_counts"][0], columns["environment_error_counts"][1:] = 1, 1
    failed.note(batch)
    failed.note(batch)
    assert [message.split(";")[0] for message in caplog.messages] == [
        "2 errors of tools, their rewards and interactions, in 2 tool calls, for 1 step(s)",
        "the program or environment of every conversation failed for 2 step(s)",
    ]


def test_interactions_that_always_fail_are_told(batch: DataProto, caplog: pytest.LogCaptureFixture) -> None:
    failed, columns = FailedConversations(), batch.non_tensor_batch
    for name in ("tool_call_counts", "tool_error_counts", "program_error_counts", "environment_error_counts"):
        columns[name] = np.array([0] * len(batch), dtype=object)
    columns["tool_error_counts"][1:] = 1
    failed.note(batch)  # that of one conversation succeeds
    assert not caplog.messages
    columns["tool_error_counts"][0] = 1
    failed.note(batch)
    (message,) = caplog.messages
    assert f"{len(batch)} errors of tools, their rewards and interactions, in 0 tool calls, for 1 step(s)" in message
