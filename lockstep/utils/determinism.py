"""Deterministic GPU kernels: a backward pass that is repeated gives the same bits.

Flash attention and other backward kernels add the parts of a gradient in the order in which they finish, unless torch is asked for
deterministic ones. An operation that has none is an error of torch that names it. Imports torch only when it is used.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def prepare_cublas() -> None:
    """Set what cuBLAS has to find before its first product in this process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def choose_attention() -> None:
    """Do without cuDNN's attention: its gradient is not deterministic, and torch chooses it in the forward pass."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Inside, torch uses deterministic kernels only, if `enabled`."""
    if not enabled:
        yield
        return
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # finds bugs, takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills
