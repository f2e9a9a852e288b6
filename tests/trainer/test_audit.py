"""The audits find what they are there for."""

import pytest
import torch

from lockstep.protocol import DataProto
from lockstep.trainer.audit import AuditError, IdleSteps, check_finite, check_policy_version, rollout_gap
from tests.tiny import random_batch


@pytest.fixture
def batch() -> DataProto:
    rows = random_batch()
    rows["rollout_log_probs"] = rows["old_log_probs"] + 0.01
    rows["policy_version"] = torch.full((len(rows),), 3)
    return DataProto(batch=rows)


def test_a_number_that_is_not_finite_is_named_with_its_row(batch: DataProto) -> None:
    check_finite(batch, "advantages", "values", "not_there")
    batch.tensors["advantages"][4, 0] = float("nan")
    with pytest.raises(AuditError, match="'advantages' is not finite in 1 of 6 rows, first row 4"):
        check_finite(batch, "values", "advantages")


def test_a_masked_place_may_hold_anything(batch: DataProto) -> None:
    batch.tensors["advantages"][:, 2] = float("inf")
    check_finite(batch, "advantages")


def test_rollouts_of_another_policy_version(batch: DataProto) -> None:
    check_policy_version(batch, 3)
    batch.tensors["policy_version"][1] = 2
    with pytest.raises(AuditError, match=r"versions \[2, 3\], the trainer is at 3"):
        check_policy_version(batch, 3)


def test_rollout_log_probs_of_other_weights(batch: DataProto) -> None:
    assert rollout_gap(batch)["training/rollout_log_probs_gap"] == pytest.approx(0.01, abs=1e-4)
    batch.tensors["rollout_log_probs"] += 1.0
    with pytest.raises(AuditError, match=r"differ from the trainer's by 1\.010"):
        rollout_gap(batch)
    assert rollout_gap(batch, corrected=True)["training/rollout_log_probs_gap"] > 1


def test_steps_that_teach_nothing_are_told(batch: DataProto, caplog: pytest.LogCaptureFixture) -> None:
    idle = IdleSteps()
    idle.note(batch)
    assert not caplog.messages
    batch.tensors["advantages"] *= 1 - batch.tensors["response_mask"]
    for _ in range(5):
        idle.note(batch)
    assert [m.split(":")[0] for m in caplog.messages] == [f"every advantage is zero for {n} step(s)" for n in (1, 2, 4)]
