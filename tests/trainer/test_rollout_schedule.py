"""Which groups run ahead of training, and what the journal says about them."""

import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lockstep.agents.trajectory import Trajectory
from lockstep.observability.run_folder import JOURNAL, JOURNAL_EVENTS
from lockstep.protocol import DataProto, object_array
from lockstep.trainer.ppo.forks import EARLIER
from lockstep.trainer.ppo.rollout_sources.group_schedule import Group, GroupSchedule
from lockstep.trainer.ppo.rollout_sources.journal import Journal, read_events, trained_groups

PER_STEP, STEPS = 3, 40


def make_group(batch: int, row: int, prompt: tuple[int, ...] = (1, 2)) -> Group:
    return Group((batch, row), DataProto.from_dict(non_tensors={"raw_prompt_ids": object_array([list(prompt)])}))


def samples(version: int = 0, prompt: tuple[int, ...] = (1, 2)) -> DataProto:
    tensors = {"policy_version": torch.tensor([version]), "policy_versions": torch.tensor([[version, -1]])}
    return DataProto.from_dict(tensors, {"raw_prompt_ids": object_array([list(prompt)])})


class Simulation:
    """Groups finish in a random order; at most `per_step` of them between two looks at the schedule."""

    def __init__(self, schedule: GroupSchedule, seed: int) -> None:
        self.schedule, self.rng, self.batch = schedule, random.Random(seed), 0
        self.trained: list[list[Group]] = []
        self.dropped: list[Group] = []

    def step(self, step: int) -> None:
        schedule = self.schedule
        while True:
            for group in schedule.too_old(step):
                schedule.drop(group)
                self.dropped.append(group)
            while schedule.room(step) > len(schedule.waiting):
                self.batch += 1
                schedule.waiting.extend(make_group(self.batch, row) for row in range(PER_STEP))
            schedule.start(step)
            if (groups := schedule.take(step)) is not None:
                self.trained.append(groups)
                return
            done = self.rng.sample(list(schedule.running.values()), min(len(schedule.running), 2))
            for group in done:
                schedule.finish(group, samples())


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("stale", ["wait", "drop"])
@pytest.mark.parametrize("seed", range(5))
def test_no_group_is_too_old_lost_or_trained_on_twice(max_staleness: int, stale: str, seed: int) -> None:
    schedule = GroupSchedule(PER_STEP, max_staleness, stale, last_step=STEPS)  # type: ignore[arg-type]
    run = Simulation(schedule, seed)
    for step in range(1, STEPS + 1):
        run.step(step)
        assert all(step - group.started <= max_staleness for group in run.trained[-1])
        assert len(run.trained[-1]) == PER_STEP
    ids = [group.id for groups in run.trained for group in groups]
    left = [*schedule.waiting, *schedule.running.values(), *schedule.finished.values()]
    assert len(set(ids)) == len(ids)
    everything = {(batch, row) for batch in range(1, run.batch + 1) for row in range(PER_STEP)}
    assert everything == set(ids) | {group.id for group in [*left, *run.dropped]}
    assert not schedule.running and not schedule.finished, "generated beyond the last step"
    if stale == "wait" or max_staleness == 0:
        assert not run.dropped
    if max_staleness == 0:
        assert ids == sorted(ids), "without staleness, steps train on the prompts in their order"


def test_waiting_for_the_oldest_group() -> None:
    """Two groups per step, one update old at most: step 2 does not go on without those of step 1."""
    schedule = GroupSchedule(per_step=2, max_staleness=1)
    schedule.waiting.extend(make_group(batch, row) for batch in range(1, 4) for row in range(2))
    a, b, c, d = schedule.start(step=1)
    for group in (b, d):
        schedule.finish(group, samples())
    assert schedule.take(step=1) == [b, d]
    e, f = schedule.start(step=2)
    for group in (e, f):
        schedule.finish(group, samples())
    assert schedule.take(step=2) is None
    schedule.finish(a, samples())
    assert schedule.take(step=2) is None, "a and one of the new ones, but c would be too old for step 3"
    schedule.finish(c, samples())
    assert schedule.take(step=2) == [a, c]


def test_groups_of_a_checkpoint_that_would_be_too_old_are_sampled_again() -> None:
    groups = [make_group(1, row) for row in range(3)]
    for group, started in zip(groups, (1, 4, 0)):
        group.started, group.samples = started, samples() if started else None
    schedule = GroupSchedule(per_step=2, max_staleness=1)
    schedule.restore(groups, step=5)
    assert [group.id for group in schedule.waiting] == [(1, 0), (1, 2)] and list(schedule.finished) == [(1, 1)]
    assert all(group.samples is None for group in schedule.waiting)


def finished(batch: int, row: int, version: int) -> Group:
    group = make_group(batch, row)
    group.samples, group.started = samples(version), version + 1
    return group


def test_journal_recovers_what_finished_after_the_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path, step=0)
    journal.finish(finished(1, 0, version=0))
    journal.train(1, [finished(1, 0, version=0)])
    journal.checkpoint(1)
    for group in (finished(2, 0, version=1), finished(2, 1, version=2), finished(3, 0, version=1)):
        journal.finish(group)
    journal.train(2, [finished(2, 0, version=1)])
    journal.close()
    journal = Journal(tmp_path, step=1, policy_version=1)
    again = make_group(2, 0)
    again.started = 2
    recovered = journal.recover(again)
    assert recovered is not None and recovered.tensors["policy_versions"].tolist() == [[1, -1]] and again.started == 2
    assert journal.recover(make_group(1, 0)) is None, "it is in the checkpoint"
    assert journal.recover(make_group(2, 1)) is None, "weights of a later update sampled it"
    assert journal.recover(make_group(3, 0, prompt=(9,))) is None, "another prompt was drawn"
    journal.close()


def test_journal_knows_the_versions_of_all_trajectories_of_a_conversation(tmp_path: Path) -> None:
    """The last one is the longest: another branch may have been sampled later."""
    journal = Journal(tmp_path, step=0)
    journal.checkpoint(1)
    for row, version in enumerate((2, 1)):
        group = finished(2, row, version=1)
        assert group.samples is not None
        branch = asdict(Trajectory([1], [5, 6], [0, 1], [0.0, -1.0], [-1, version]))
        group.samples.non_tensor_batch[EARLIER] = object_array([[branch]])
        journal.finish(group)
    journal.close()
    journal = Journal(tmp_path, step=1, policy_version=1)
    assert journal.recover(make_group(2, 0)) is None, "weights of a later update sampled a branch"
    assert journal.recover(make_group(2, 1)) is not None
    journal.close()


def test_journal_undoes_steps_after_the_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path, step=0)
    journal.train(1, [make_group(1, 0)])
    journal.checkpoint(1)
    journal.train(2, [make_group(1, 1)])
    journal.close()
    with open(tmp_path / JOURNAL / JOURNAL_EVENTS, "ab") as file:
        file.write(b'{"event": "tra')  # the process died
    journal = Journal(tmp_path, step=1, policy_version=1)
    journal.train(2, [make_group(2, 0)])
    journal.close()
    assert trained_groups(tmp_path) == {1: [(1, 0)], 2: [(2, 0)]}
    assert [event["event"] for event in read_events(tmp_path)] == ["train", "checkpoint", "train", "resume", "train"]


@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: content[:-20] + bytes(20)])
def test_damaged_samples_are_sampled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    journal = Journal(tmp_path, step=0)
    journal.checkpoint(1)
    journal.finish(finished(2, 0, version=1))
    journal.close()
    file = next((tmp_path / JOURNAL).glob("samples_after_1.bin"))
    file.write_bytes(damage(file.read_bytes()))
    journal = Journal(tmp_path, step=1, policy_version=1)
    assert journal.recover(make_group(2, 0)) is None
    assert "sampled again" in caplog.text
    journal.close()


@pytest.mark.parametrize(
    "damage", [b"", b"{", bytes(40), b"[1]", b"{}", b'{"event": "finish", "group": 3}', b"\xff\xfe", b"[" * 9999]
)
def test_a_damaged_line_costs_its_own_group(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    journal = Journal(tmp_path, step=0)
    journal.train(1, [make_group(1, 0)])
    journal.checkpoint(1)
    for row in range(3):
        journal.finish(finished(2, row, version=1))
    journal.close()
    file = tmp_path / JOURNAL / JOURNAL_EVENTS
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([*lines[:3], damage, *lines[4:]]))
    journal = Journal(tmp_path, step=1, policy_version=1)
    assert f"{file}, line 4 is damaged and skipped" in caplog.text
    assert [journal.recover(make_group(2, row)) is not None for row in range(3)] == [True, False, True]
    journal.train(2, [make_group(2, 0)])
    journal.close()
    assert trained_groups(tmp_path) == {1: [(1, 0)], 2: [(2, 0)]}


def test_a_lost_mark_recovers_no_samples_of_other_weights(tmp_path: Path) -> None:
    journal = Journal(tmp_path, step=0)
    journal.checkpoint(1)
    journal.checkpoint(2)
    journal.finish(finished(2, 0, version=2))
    journal.close()
    journal = Journal(tmp_path, step=1, policy_version=1)  # step 2 is trained again, with other settings
    journal.checkpoint(2)
    journal.close()
    file = tmp_path / JOURNAL / JOURNAL_EVENTS
    lines = file.read_bytes().split(b"\n")
    assert b"checkpoint" in lines[-2]
    file.write_bytes(b"\n".join([*lines[:-2], b"{", b""]))
    journal = Journal(tmp_path, step=2, policy_version=2)
    assert journal.recover(make_group(2, 0)) is None
    journal.close()


def test_a_run_that_starts_over_uses_no_earlier_samples(tmp_path: Path) -> None:
    journal = Journal(tmp_path, step=0)
    journal.finish(finished(1, 0, version=0))
    journal.close()
    journal = Journal(tmp_path, step=0)
    assert journal.recover(make_group(1, 0)) is None
    journal.close()
