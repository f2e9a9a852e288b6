"""Where and in which precision the operations of a layer run."""

import os

import pytest
import torch

from lockstep.kernels import linear, ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The torch reference on the CPU; the Triton form on a GPU, or on the CPU with TRITON_INTERPRET=1."""
    if request.param == "reference":
        return "cpu"
    if INTERPRETED:
        for module in (linear, ops):
            monkeypatch.setattr(module, "on_gpu", lambda x: True)
    elif not torch.cuda.is_available():
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if request.param == torch.bfloat16 and INTERPRETED:
        pytest.skip("mixed products need CUDA")
    chosen: torch.dtype = request.param
    return chosen
