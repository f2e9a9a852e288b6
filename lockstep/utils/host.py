"""How a process that computes on the CPU uses its threads and its memory."""

import ctypes
import os
import sys

import torch

SMALL_MODEL = 5_000_000
"""Parameters below which the tensors of a decode step are so small that threads would wait for each other most of the time."""
TRAINING_THREADS = 2
"""The most that the larger tensors of a small model's update keep busy."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's malloc.h."""
KEPT_BYTES = 1 << 30
LARGEST_KEPT_BLOCK = 1 << 25
"""The most that glibc takes for it."""

_NUM_THREADS = torch.get_num_threads()
_num_set = _NUM_THREADS
_largest_model = 0


def settle_on_host(num_parameters: int) -> None:
    """Note that this process has a model of this size, and keep freed memory for what comes next.

    Memory that went back to the system would be cleared page by page when the next tensor takes it. Who has tuned malloc is heard.
    """
    global _largest_model
    _largest_model = max(_largest_model, num_parameters)
    is_tuned = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" and not is_tuned else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def take_threads(*, decoding: bool) -> None:
    """Have as many threads as the coming phase can use: few where all models of this process are small.

    Who has said how many, by OMP_NUM_THREADS or torch.set_num_threads, is heard.
    """
    global _num_set
    if "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() != _num_set:
        return
    wanted = _NUM_THREADS
    if _largest_model < SMALL_MODEL:
        wanted = min(wanted, 1 if decoding or _threads_sleep() else TRAINING_THREADS)
    if wanted != _num_set:
        torch.set_num_threads(wanted)
        _num_set = wanted


def _threads_sleep() -> bool:
    """Whether threads that wait were told to sleep: they would wake too late for small tensors."""
    return os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" or os.environ.get("GOMP_SPINCOUNT") == "0"
