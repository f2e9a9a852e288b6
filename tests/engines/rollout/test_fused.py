"""The faster forwards of a model that serves on a CUDA device."""

import pytest
import torch

from tests.engines.rollout.rollout_cases import tiny_model
from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.engines.rollout.embedded.fused import FusedModules  # noqa: E402
from lockstep.engines.rollout.embedded.runner import ModelRunner  # noqa: E402
from lockstep.models.attention import PackedAttention  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma", "mixtral"])
@torch.no_grad()
def test_the_last_layer_ends_with_the_tokens_that_are_wanted(kind: str) -> None:
    model = tiny_model(kind, DEVICE).eval()
    runner = ModelRunner(model, block_size=4)
    runner._fused = fused = FusedModules(model)
    ids = torch.tensor([[7, 3, 50, 9, 9, 4, 8]], device=DEVICE)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]], device=DEVICE)
    wanted = torch.tensor([3, 6, 6], device=DEVICE)

    def hidden(places: torch.Tensor | None = None) -> torch.Tensor:
        return runner.forward(ids, positions, PackedAttention([4, 3], DEVICE), wanted=places)

    with fused.installed():
        whole = hidden()
        torch.testing.assert_close(hidden(wanted), whole[wanted], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(hidden(), whole)
    torch.testing.assert_close(whole, hidden(), atol=1e-4, rtol=1e-4)
    assert fused._last is not None
