"""Where the kernels run in the tests: a CUDA device, or Triton's interpreter on the CPU (TRITON_INTERPRET=1)."""

import os

import pytest
import torch


def kernel_device() -> torch.device:
    """Skips the module where there is neither."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
