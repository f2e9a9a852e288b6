"""The rollout is repaired while the trainer keeps its state: what is done, in which order, and when it is given up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from lockstep.protocol.generation import WeightsLostError
from lockstep.single_controller import WorkerDiedError
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.rollout_repair import MAX_IN_A_ROW, RolloutRepair
from lockstep.trainer.ppo.rollout_sources.background import BackgroundRollout
from lockstep.trainer.ppo.rollout_sources.colocated import ColocatedSource
from lockstep.trainer.ppo.rollout_sources.group_schedule import GroupSchedule
from lockstep.trainer.ppo.rollout_sources.journal import Journal
from lockstep.trainer.ppo.rollout_sources.one_step_off import OneStepOffSource
from lockstep.trainer.ppo.rollout_sources.rollout_source import AsyncSource
from lockstep.trainer.ppo.rollout_sources.synchronous import SynchronousSource
from tests.trainer.test_rollout_schedule import make_group, samples


class Parts:
    """Stands for worker groups, weight updates and sampling; `done` has what was called."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.rollout_alone = True
        self.failures: list[Exception] = []

    def only_rollout_died(self) -> bool:
        return self.rollout_alone

    def restart_rollout(self) -> None:
        self.done.append("restart")

    def reconnect(self) -> None:
        self.done.append("reconnect")

    def forget_failures(self) -> None:
        self.done.append("forget")

    def run(self, version: int) -> dict[str, float]:
        self.done.append(f"weights {version}")
        return {"weight_sync/gb": 1.0}

    def collect(self, prompts: Any, *, step: int, timing: dict[str, float]) -> tuple[Any, dict[str, float]]:
        drawn = [next(prompts), next(prompts)]
        if self.failures:
            raise self.failures.pop(0)
        return drawn, {}


@pytest.fixture
def parts() -> Parts:
    return Parts()


@pytest.fixture
def source(parts: Parts) -> SynchronousSource:
    made: Any = SynchronousSource(parts, parts)  # type: ignore[arg-type]
    made.repair = RolloutRepair(parts, parts, parts)  # type: ignore[arg-type]
    made.policy_version = 7
    return made


def test_dead_processes_are_replaced_and_the_same_prompts_sampled_again(
    source: SynchronousSource, parts: Parts
) -> None:
    parts.failures = [WorkerDiedError("rank 0 of the rollout died"), WeightsLostError("no server has the weights")]
    prompts: Any = iter("abcdef")
    batch, _ = source.collect(prompts, step=1, timing={})
    assert (batch, next(prompts)) == (["a", "b"], "c")
    assert parts.done == ["restart", "reconnect", "forget", "weights 7", "forget", "weights 7"]
    assert source.repair is not None and source.repair.count == 2


def test_processes_that_died_between_steps_are_replaced(source: SynchronousSource, parts: Parts) -> None:
    """The first call of a step finds it: what rollout engines keep is remembered."""
    failures = [WorkerDiedError("it died during the update")]

    def mark_rollout() -> None:
        if failures:
            raise failures.pop()
        parts.done.append("mark")

    trainer: Any = SimpleNamespace(
        source=source, rollout_wg=SimpleNamespace(mark_rollout=mark_rollout), _saves_rollout_state=True
    )
    PPOTrainer._mark_rollout(trainer)
    assert parts.done == ["restart", "reconnect", "forget", "weights 7", "mark"]


def test_weights_that_could_not_be_sent_are_sent_again(
    source: SynchronousSource, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[Any] = [WorkerDiedError("it died"), {}, {"weight_sync/gb": 1.0}]

    def run(version: int) -> Any:
        assert version == 8
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(parts, "run", run)
    assert source.update_weights(8) == {"weight_sync/gb": 1.0}


def test_what_cannot_be_repaired_is_raised(source: SynchronousSource, parts: Parts) -> None:
    prompts: Any = iter(range(1000))
    parts.failures = [WorkerDiedError(str(number)) for number in range(MAX_IN_A_ROW + 1)]
    with pytest.raises(WorkerDiedError, match=f"^{MAX_IN_A_ROW}$"):
        source.collect(prompts, step=1, timing={})
    assert source.repair is not None
    source.repair.step_is_complete()
    parts.rollout_alone = False
    parts.failures = [WorkerDiedError("the actor died")]
    with pytest.raises(WorkerDiedError, match="the actor died"):
        source.collect(prompts, step=2, timing={})
    source.repair = None
    parts.failures = [WeightsLostError("lost")]
    with pytest.raises(WeightsLostError):
        source.collect(prompts, step=2, timing={})


class Sampler:
    """Stands for `GroupSampler` and its client. outcomes: what becomes of each attempt, by row; it waits for an event first."""

    n = 1

    def __init__(self, *outcomes: list[tuple[asyncio.Event | None, Exception | None]]) -> None:
        self.outcomes = outcomes
        self.client = self
        self.is_serving = False
        self.num_begun = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.resume()
        yield

    async def resume(self) -> None:
        assert not self.is_serving
        self.is_serving = True
        self.num_begun += 1

    async def pause(self) -> None:
        assert self.is_serving
        self.is_serving = False

    def forget_failure(self) -> None: ...

    async def sample(self, prompt: Any, *, step: int, draw: int, number: int) -> Any:
        event, error = self.outcomes[number].pop(0)
        if event is not None:
            await event.wait()
        if error is not None:
            raise error
        return samples()


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_failure_that_is_reported_after_the_repair_costs_no_other(tmp_path: Path, is_paused: bool) -> None:
    """Two groups meet one failure: the first reports it at once, the conversations of the second end after the repair."""
    died = WorkerDiedError("rank 0 of the rollout died")
    ends = asyncio.Event()
    sampler: Any = Sampler([(None, died), (None, None)], [(ends, died), (None, None)])
    rollout = BackgroundRollout(sampler, GroupSchedule(2, 0), Journal(tmp_path, 0), lambda samples: True)
    try:
        rollout.add([make_group(1, 0), make_group(1, 1)])
        rollout.resume()
        with pytest.raises(WorkerDiedError):
            rollout.take(1)
        if is_paused:  # by a validation, say
            with pytest.raises(WorkerDiedError):
                rollout.pause()
        assert rollout.interrupt() is not is_paused
        rollout.recover(generate=not is_paused)
        assert sampler.is_serving is not is_paused
        rollout.resume()
        rollout._loop.call_soon_threadsafe(ends.set)
        groups = rollout.take(1)
        assert groups is not None and [group.id for group in groups] == [(1, 0), (1, 1)]
        assert sampler.outcomes == ([], []) and sampler.num_begun == 2
    finally:
        rollout.close()


class AsyncParts(Parts):
    """The background rollout and the schedule of an asynchronous source: groups are taken once."""

    waiting, running, finished = ("next",), (), ()
    per_step, max_staleness, last_step = 1, 1, 9
    num_dropped: ClassVar[dict[str, int]] = {"filtered": 0}

    def __init__(self) -> None:
        super().__init__()
        self.groups = [["first"], ["second"]]

    def room(self, step: int) -> int:
        return 0

    def take(self, step: int) -> list[str]:
        return self.groups.pop(0)

    def start(self, step: int) -> None:
        self.done.append("start")

    def resume(self) -> None:
        self.done.append("resume")

    def pause(self) -> None:
        self.done.append("pause")
        if self.failures:
            raise self.failures.pop(0)

    def interrupt(self) -> bool:
        return False

    def recover(self, *, generate: bool) -> None:
        self.done.append("recover")


@pytest.mark.parametrize("cls", [OneStepOffSource, ColocatedSource])
def test_groups_that_were_taken_are_trained_on_after_a_repair(cls: type[AsyncSource]) -> None:
    parts = AsyncParts()
    source: Any = cls.__new__(cls)
    source.schedule = source.rollout = source.weight_sync = parts
    source.repair = RolloutRepair(parts, parts, parts)  # type: ignore[arg-type]
    source.policy_version, source.is_updated, source.sync_metrics = 7, True, {}
    source.schedule.running = ("busy",)  # weights are sent between two batches
    parts.failures = [WorkerDiedError("rank 0 of the rollout died")]
    groups = source.repairing(lambda: source._take(iter(()), 1))
    assert groups == ["first"] and parts.groups == [["second"]]
    assert "restart" in parts.done and "weights 7" in parts.done
