"""Kernels compiled ahead, by launches on the padding slot."""

import pytest
import torch

from tests.engines.rollout.rollout_cases import tiny_model
from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.engines.rollout.embedded.cuda.decode_slots import DecodeSlots  # noqa: E402
from lockstep.engines.rollout.embedded.cuda.kernel_warmup import KernelWarmup  # noqa: E402
from lockstep.engines.rollout.embedded.model_runner import ModelRunner  # noqa: E402
from lockstep.kernels import sampling  # noqa: E402

pytestmark = pytest.mark.gpu


def start_warmup(kind: str) -> KernelWarmup:
    runner = ModelRunner(tiny_model(kind, DEVICE).eval(), block_size=4)
    slots = DecodeSlots(3, 4, table_width=6, max_stop_ids=4, num_steps=2, device=DEVICE)
    return KernelWarmup(runner, slots, max_splits=2)


@pytest.mark.parametrize("kind", ["qwen2", "gemma", "gemma2", "gpt_oss"])
def test_all_kernels_run_and_leave_the_slots_unchanged(kind: str) -> None:
    warmup = start_warmup(kind)
    warmup.wait()
    num_shapes = len(set(warmup.runner.layers().values()))
    # sum_tiles, pick_token, begin_step; per layer shape one write, attention with one split and with two
    assert [future.exception() for future in warmup._futures] == [None] * (3 + 3 * num_shapes)
    slots = warmup.slots
    assert not slots.slot_state.any() and not slots.step.any() and not slots.sampled[:, : slots.padding_slot].any()


def test_errors_are_left_to_the_real_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(sampling, "pick_token", fail)
    start_warmup("qwen2").wait()
