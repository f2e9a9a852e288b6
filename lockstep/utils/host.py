"""How a process computes on the CPU: number of threads, matrix library; and how much memory it uses."""

import os
import platform
import threading
from pathlib import Path

import torch

os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # else oneDNN leaves /tmp/perf-PID.map behind on ARM

SMALL_MODEL = 5_000_000
"""Parameters below which tensors are so small that threads would mostly wait for each other, spinning."""

_largest_model = 0


def prepare_cpu_for(num_parameters: int) -> None:
    """Set up torch for a model of this size. To be called for every model that the process computes with."""
    _set_threads(num_parameters)
    choose_matrix_library()


def choose_matrix_library() -> None:
    """Use OpenBLAS instead of oneDNN on ARM cores without bfloat16: it is 10 % faster, and 6 times with small matrices.

    A small model keeps oneDNN unless OMP_NUM_THREADS is set: torch then has one thread, but oneDNN uses all cores, which makes
    training 10 % faster.
    """
    small = _largest_model < SMALL_MODEL and "OMP_NUM_THREADS" not in os.environ
    if platform.machine() == "aarch64" and not small and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def _set_threads(num_parameters: int) -> None:
    """Use one thread if all models of this process are small. Respects OMP_NUM_THREADS and torch.set_num_threads."""
    global _largest_model
    _largest_model = max(_largest_model, num_parameters)
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() in (1, _DEFAULT):
        torch.set_num_threads(1 if _largest_model < SMALL_MODEL else _DEFAULT)


_DEFAULT = torch.get_num_threads()


class HostPeak:
    """Peak of this process's own memory inside the context, in bytes beyond what it had on entry (Linux).

    Own memory is `RssAnon` and `RssShmem` of /proc/self/status. Pages of files that are mapped, as safetensors files are, do not
    count: the kernel drops them when memory is short.
    """

    def __init__(self, period_s: float = 0.002) -> None:
        self._period_s = period_s
        self._done = threading.Event()
        self.num_bytes = 0

    def __enter__(self) -> "HostPeak":
        self._start = _own_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            last = self._done.wait(self._period_s)
            self.num_bytes = max(self.num_bytes, _own_bytes() - self._start)
            if last:
                return


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
