"""A mini-batch that does not fit is computed again in smaller micro-batches: the same numbers as if they had been configured."""

import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.engines.train.micro_batch_limits import MicroBatchLimits, failure_of, halved
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.utils.seqlen import agreed_runs
from tests.engines.train import cases
from tests.engines.train.cases import Case
from tests.out_of_memory import Memory, Where, limited
from tests.tiny import save_tiny_model

KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
ALL_REAL = cases.NUM_ROWS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def check_equal(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert result["steps"] == expected["steps"]
    for part in ("outputs", "weights"):
        for name, values in expected[part].items():
            np.testing.assert_array_equal(result[part][name], values, err_msg=name)


def train(folder: Path, case: Case, memory: Memory | None = None) -> tuple[dict[str, Any], Any]:
    engine = cases.build_engine(folder, case)
    with limited(memory or Memory(10**9)):
        result = cases._run(engine, case, 3)
    return result | {"weights": cases.weights_of(engine)}, engine


SIZES = {"tokens": MicroBatching(max_tokens=1000), "rows": MicroBatching(num_rows=8), "all": MicroBatching()}


@pytest.mark.parametrize(
    ("case", "by", "where", "most"),
    [
        (Case(), "tokens", "forward", 40),
        (Case(), "all", "backward", 40),
        (Case(packed=False), "tokens", "backward", 80),
        (Case(packed=False), "rows", "forward", 80),
        (Case(kind="value"), "tokens", "backward", 40),
        (Case(lora=4, compute=torch.bfloat16), "rows", "backward", 40),
        (Case(compute=torch.bfloat16, frozen="layers.0"), "tokens", "backward", 40),
        (Case(checkpointing=True), "tokens", "backward", 40),
    ],
    ids=str,
)
def test_equal_to_the_configured_size(case: Case, by: str, where: Where, most: int, folder: Path) -> None:
    given = replace(case, micro=replace(SIZES[by], key=KEY), num_real=ALL_REAL)
    memory = Memory(most, where)
    result, engine = train(folder, given, memory)
    assert memory.num_failures == len(engine.limits.take()) > 0
    size = engine.limits.sizes[KEY]
    configured = MicroBatching(max_tokens=size) if by == "tokens" else MicroBatching(num_rows=size)
    expected, _ = train(folder, replace(given, micro=configured))
    check_equal(result, expected)
    if case == Case():
        whole, _ = train(folder, given)
        np.testing.assert_allclose(result["steps"], whole["steps"], rtol=2e-4)


def test_the_limit_stays_and_is_reported_once(folder: Path) -> None:
    case = Case(micro=MicroBatching(max_tokens=1000, key=KEY), num_real=ALL_REAL)
    engine = cases.build_engine(folder, case)
    with limited(Memory(40)) as memory:
        cases.engine_step(engine, case, 0)
        first = memory.num_failures
        lowered = engine.limits.take()
        assert [key for key, _ in lowered] == [KEY] * first and lowered[-1][1] == engine.limits.sizes[KEY]
        assert [size for _, size in lowered] == sorted((size for _, size in lowered), reverse=True)
        cases.engine_step(engine, case, 0)
        assert memory.num_failures == first and engine.limits.take() == []


def test_keys_have_their_own_limits() -> None:
    limits = MicroBatchLimits()
    limits.lower("a", 8)
    assert limits.within(MicroBatching(max_tokens=100, key="b")).max_tokens == 100
    assert limits.within(MicroBatching(max_tokens=100, key="a")).max_tokens == 8
    assert limits.within(MicroBatching(max_tokens=5, key="a")).max_tokens == 5
    assert limits.within(MicroBatching(num_rows=100, group_size=2, key="a")).num_rows == 16
    assert limits.within(MicroBatching(group_size=2, key="a")).num_rows == 16


@pytest.mark.parametrize(("size", "used", "expected"), [(16, 16, 8), (16384, 5000, 4096), (7, 2, 1), (3, 3, 1)])
def test_halved(size: int, used: int, expected: int) -> None:
    assert halved(size, used) == expected


def test_a_row_longer_than_a_lowered_budget_is_alone() -> None:
    parts = agreed_runs([3, 50, 3, 3], [1, 1, 1, 1], [0, 1, 2, 3], 8, longer_alone=True)
    assert parts == [[0], [1], [2, 3]]
    with pytest.raises(ValueError, match="more than the budget of 8"):
        agreed_runs([3, 50, 3, 3], [1, 1, 1, 1], [0, 1, 2, 3], 8)


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_single_sequence_or_pair_that_does_not_fit(group_size: int, folder: Path) -> None:
    micro = MicroBatching(max_tokens=1000, group_size=group_size, key=KEY)
    case = Case(micro=micro, num_real=ALL_REAL)
    engine = cases.build_engine(folder, case)
    rows = cases.make_batch(0, ALL_REAL)
    lengths = rows["attention_mask"].sum(1).reshape(-1, group_size).sum(1)
    with limited(Memory(int(lengths.max()) - 1)), pytest.raises(torch.OutOfMemoryError) as raised:
        cases.engine_step(engine, case, 0)
    failure = failure_of(raised.value)
    assert failure is not None and failure.smaller is None and failure.key == KEY
    assert failure.num_sequences == group_size and failure.prompt + failure.response == int(lengths.max())


def test_an_earlier_gradient_is_not_lost(folder: Path) -> None:
    case = Case(micro=MicroBatching(num_rows=8, key=KEY), num_real=ALL_REAL)
    engine = cases.build_engine(folder, case)
    rows = cases.make_batch(0, ALL_REAL)

    def loss_fn(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return outputs["log_probs"].sum(), {}

    engine.forward_backward(rows, loss_fn, case.micro)
    with limited(Memory(60)), pytest.raises(torch.OutOfMemoryError):
        engine.forward_backward(rows, loss_fn, case.micro)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_random_numbers_and_the_loss_begin_again(where: Where, folder: Path) -> None:
    """A loss that draws random numbers, as dropout does, and collects what it has seen."""

    class Loss:
        def __init__(self) -> None:
            self.seen: list[tuple[int, ...]] = []
            self.num_restarts = 0

        def __call__(self, outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            noise = torch.rand(()) + float(np.random.rand()) + random.random()
            self.seen += [tuple(row.tolist()) for row in part["responses"]]
            loss = noise * cases.summed_loss(outputs, part)
            return loss, {"loss": loss, "noise": noise}

        def restart(self) -> None:
            self.seen.clear()
            self.num_restarts += 1

    def run(micro: MicroBatching, most: int) -> tuple[Any, ...]:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        case, loss = Case(micro=micro, num_real=ALL_REAL), Loss()
        engine = cases.build_engine(folder, case)
        with limited(Memory(most, where)):
            metrics = engine.forward_backward(cases.make_batch(0, ALL_REAL), loss, micro, **cases.options(case))
        return metrics, engine.optimizer_step(), loss, float(torch.rand(())), engine.limits.sizes

    *result, loss, after, sizes = run(MicroBatching(num_rows=8), 40)
    *expected, other, other_after, _ = run(MicroBatching(num_rows=sizes["num_rows"]), 10**9)
    assert (result, loss.seen, after) == (expected, other.seen, other_after)
    assert len(loss.seen) == ALL_REAL and loss.num_restarts > 0 == other.num_restarts


def test_other_errors_pass(folder: Path) -> None:
    case = Case(micro=MicroBatching(num_rows=8), num_real=ALL_REAL)
    engine = cases.build_engine(folder, case)

    def loss_fn(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal") as raised:
        engine.forward_backward(cases.make_batch(0, ALL_REAL), loss_fn, case.micro)
    assert failure_of(raised.value) is None


def test_memory_that_runs_out_after_the_micro_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones would not help."""
    case = Case(micro=MicroBatching(num_rows=2, key=KEY), num_real=ALL_REAL)
    engine = cases.build_engine(folder, case)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    monkeypatch.setattr("lockstep.engines.train.token_engine._joined", Mock(side_effect=error))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        engine.forward(cases.make_batch(0, ALL_REAL), case.micro)
    assert raised.value is error and failure_of(error) is None and not engine.limits.sizes


def test_tensors_of_the_failed_pass_are_freed(folder: Path) -> None:
    case = Case(micro=MicroBatching(num_rows=8), num_real=ALL_REAL)
    engine = cases.build_engine(folder, case)
    held: list[Any] = []

    def loss_fn(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        if len(part) > 4:
            held.append(weakref.ref(outputs["log_probs"]))
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory")
        assert held and held[0]() is None
        return outputs["log_probs"].sum(), {}

    engine.forward_backward(cases.make_batch(0, ALL_REAL), loss_fn, case.micro)
    assert engine.limits.sizes == {"num_rows": 4}
