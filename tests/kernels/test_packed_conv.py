"""The packed convolution of Gated DeltaNet against one row with the inputs before each sequence in front of it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.models.gated_delta import PackedGatedDelta  # noqa: E402
from lockstep.models.state_rows import RowBounds, RowStates  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
LENGTHS = [[1, 2, 3, 4, 5, 70, 1, 64], [130], [6, 9], [1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("channels", "width"), [(70, 4), (16, 2)])
def test_values_states_and_gradients(
    channels: int, width: int, lengths: list[int], with_state: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    conv: Any = SimpleNamespace(weight=nn.Parameter(random(channels, 1, width)), bias=None)
    core = PackedGatedDelta(SimpleNamespace(conv_kernel_size=width, conv1d=conv, activation="silu"))
    core.functions = modeling_qwen3_next
    bounds = RowBounds(np.array([0, *np.cumsum(lengths)]), DEVICE)
    wide, state = random(sum(lengths), channels + 5), random(len(lengths), channels, width)
    y_weights, state_weights = random(sum(lengths), channels), random(len(lengths), channels, width)
    results = []
    for form in (core._convolution_kernel, core._one_row):
        leaves = [wide.clone().requires_grad_(), state.clone().requires_grad_()]
        conv.weight.grad = None
        states = RowStates({("conv", 0): leaves[1]} if with_state else {})
        y = form(leaves[0][:, 2:-3], bounds, states)
        after = states.tensors["conv", 0]
        ((y * y_weights).sum() + (after * state_weights).sum()).backward()
        results.append([y, after, leaves[0].grad, conv.weight.grad, leaves[1].grad])
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for ours, reference in zip(*results):
        assert (ours is None) == (reference is None)
        if ours is not None:
            torch.testing.assert_close(ours.float(), reference.float(), atol=tolerance, rtol=tolerance)
