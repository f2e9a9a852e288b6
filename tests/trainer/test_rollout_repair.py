"""The rollout is repaired while the trainer keeps its state: what is done, in which order, and when it is given up."""

from typing import Any

import pytest

from lockstep.protocol.generation import WeightsLostError
from lockstep.single_controller import WorkerDiedError
from lockstep.trainer.ppo.rollout_repair import MAX_IN_A_ROW, RolloutRepair
from lockstep.trainer.ppo.rollout_sources.synchronous import SynchronousSource


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
    made.repair = RolloutRepair(parts, parts, lambda: parts.done.append("repaired"))  # type: ignore[arg-type]
    made.policy_version = 7
    return made  # type: ignore[no-any-return]


def test_dead_processes_are_replaced_and_the_same_prompts_sampled_again(
    source: SynchronousSource, parts: Parts
) -> None:
    parts.failures = [WorkerDiedError("rank 0 of the rollout died"), WeightsLostError("no server has the weights")]
    prompts: Any = iter("abcdef")
    batch, _ = source.collect(prompts, step=1, timing={})
    assert (batch, next(prompts)) == (["a", "b"], "c")
    assert parts.done == ["restart", "reconnect", "repaired", "weights 7", "repaired", "weights 7"]
    assert source.repair is not None and source.repair.count == 2


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
