"""How a process that computes on the CPU uses its threads and its memory."""

import ctypes
import os
import sys

import torch

SMALL_MODEL = 5_000_000
"""Parameters below which the tensors of a step are so small that threads would wait for each other most of the time."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's malloc.h."""
KEPT_BYTES = 1 << 30
LARGEST_KEPT_BLOCK = 1 << 25
"""The most that glibc takes for it."""

_NUM_THREADS = torch.get_num_threads()
_num_set = _NUM_THREADS
_largest_model = 0


def settle_on_host(num_parameters: int) -> None:
    """For a model of this size in this process: one thread where all are small, and freed memory kept for what comes next.

    Who has said how many threads, by OMP_NUM_THREADS or torch.set_num_threads, is heard; and so is who has tuned malloc.
    Memory that went back to the system would be cleared page by page when the next tensor takes it.
    """
    global _largest_model, _num_set
    _largest_model = max(_largest_model, num_parameters)
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() == _num_set:
        _num_set = 1 if _largest_model < SMALL_MODEL else _NUM_THREADS
        torch.set_num_threads(_num_set)
    is_tuned = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" and not is_tuned else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
