"""Kernels launched ahead for the spare seat."""

import pytest
import torch

from tests.engines.rollout.rollout_cases import tiny_model
from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.engines.rollout.embedded.rehearsal import Rehearsal  # noqa: E402
from lockstep.engines.rollout.embedded.runner import ModelRunner  # noqa: E402
from lockstep.engines.rollout.embedded.seats import Seats  # noqa: E402
from lockstep.kernels import sampling  # noqa: E402

pytestmark = pytest.mark.gpu


def rehearsal_of(kind: str) -> Rehearsal:
    runner = ModelRunner(tiny_model(kind, DEVICE).eval(), block_size=4)
    seats = Seats(3, 4, table_width=6, num_stops=4, num_steps=2, device=DEVICE)
    return Rehearsal(runner, seats, max_splits=2)


@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_all_kernels_of_a_step_run_and_leave_the_seats_as_they_were(kind: str) -> None:
    rehearsal = rehearsal_of(kind)
    rehearsal.end()
    assert rehearsal._steps is not None and len(rehearsal._steps) == 3  # begin, attend in one and in two stretches
    assert [future.exception() for future in (*rehearsal._first, *rehearsal._steps)] == [None] * 7
    seats = rehearsal.seats
    assert not seats.state.any() and not seats.step.any() and not seats.drawn[:, : seats.spare].any()


def test_one_that_fails_is_left_to_the_real_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(sampling, "pick", fail)
    rehearsal = rehearsal_of("qwen2")
    for _ in range(2):
        rehearsal.end_first()
        rehearsal.end()
