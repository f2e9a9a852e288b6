"""The delta rule over packed rows, chunk by chunk, against transformers' chunks of tokens."""

import numpy as np
import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.models.gated_delta import ScannedGatedDelta, gated_delta  # noqa: E402
from lockstep.models.state_rows import RowBounds, RowStates  # noqa: E402
from tests.kernels.delta_cases import Mixer, TorchForm  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE.type == "cuda" else [torch.float32]
SHAPES = [(2, 4, 16, 16, 4), (1, 3, 24, 40, 2), (2, 2, 128, 128, 4)]
"""HK, HV, DK, DV, K."""
LENGTHS = [[1, 5, 2, 33], [3]] if DEVICE.type == "cpu" else [[1, 5, 2, 130, 64, 1, 700], [3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_rows_equal_the_torch_form(
    shape: tuple[int, int, int, int, int], lengths: list[int], with_state: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    mixer = Mixer(*shape, dtype)
    bounds = RowBounds(np.array([0, *np.cumsum(lengths)]), DEVICE)
    wide = torch.randn(1, sum(lengths), mixer.conv_dim + 2 * mixer.num_v_heads + 3, device=DEVICE)
    x = wide.to(dtype)[..., :-3]  # rows with a stride
    before = {}
    if with_state:
        sizes = mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
        before["recurrent", 0] = torch.randn(len(lengths), *sizes, device=DEVICE) / 4
        before["conv", 0] = torch.randn(len(lengths), mixer.conv_dim, mixer.conv_kernel_size, device=DEVICE).to(dtype)
    states = RowStates(dict(before))
    core = ScannedGatedDelta(mixer)
    core._packed_convolution = core._convolution_kernel  # type: ignore[method-assign]
    ours = core.packed(x, bounds, states)
    assert ours.dtype == dtype and ours.isfinite().all()
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    start = 0
    for row, length in enumerate(lengths):
        own = RowStates({name: tensor[row : row + 1].clone() for name, tensor in before.items()})
        theirs = TorchForm(mixer)(x[:, start : start + length], own)
        torch.testing.assert_close(
            ours[:, start : start + length].float(), theirs.float(), atol=tolerance, rtol=tolerance
        )
        for name, tensor in own.tensors.items():
            torch.testing.assert_close(
                states.tensors[name][row].float(), tensor[0].float(), atol=tolerance, rtol=tolerance
            )
        start += length


@torch.no_grad()
def test_repeated_tokens_amplify_no_rounding() -> None:
    """Equal keys, a gate of 1 and no decay: entries of the inverse are 0, 1 and -1, those of the powers in the thousands."""
    torch.manual_seed(0)
    mixer = Mixer(1, 2, 16, 16, 4, torch.float32)
    mixer.A_log.fill_(-20.0)
    x = torch.randn(1, 1, mixer.conv_dim + 2 * mixer.num_v_heads, device=DEVICE).expand(1, 60, -1).contiguous()
    x[..., mixer.conv_dim : mixer.conv_dim + 2] = 20.0
    core = ScannedGatedDelta(mixer)
    core._packed_convolution = core._convolution_kernel  # type: ignore[method-assign]
    ours = core.packed(x, RowBounds(np.array([0, 60]), DEVICE), RowStates())
    torch.testing.assert_close(ours, TorchForm(mixer)(x, RowStates()), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="on a CPU the torch form computes")
def test_it_computes_what_has_no_gradient() -> None:
    mixer = Mixer(2, 4, 16, 16, 4, torch.float32)
    x = torch.zeros(1, 2, mixer.conv_dim + 2 * mixer.num_v_heads, device=DEVICE)
    assert not isinstance(gated_delta(mixer, x), ScannedGatedDelta)
    with torch.no_grad():
        assert isinstance(gated_delta(mixer, x), ScannedGatedDelta)
