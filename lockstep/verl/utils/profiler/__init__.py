"""verl.utils.profiler: timers and memory logs."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from lockstep.utils import timing
from lockstep.utils.distributed import current_rank
from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {"lockstep.verl.utils.profiler.profile": ("DistProfiler", "DistProfilerExtension", "ProfilerConfig")},
)

_LOGGER = logging.getLogger(__name__)
_GB = 2**30


@contextmanager
def marked_timer(
    name: str,
    timing_raw: dict[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """Add the block's duration to `timing_raw[name]`. color, domain and category mark the profiles of verl; not used here."""
    with timing.marked_timer(name, timing_raw):
        yield


simple_timer = timing.marked_timer


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int | None = 0
) -> None:
    """Log allocated and reserved GPU memory, on one rank or (None) on all; nothing without a GPU."""
    if not torch.cuda.is_available() or (rank is not None and current_rank() != rank):
        return
    (logger or _LOGGER).log(
        level,
        "%s, memory allocated (GB): %.2f, memory reserved (GB): %.2f",
        head,
        torch.cuda.memory_allocated() / _GB,
        torch.cuda.memory_reserved() / _GB,
    )


class GPUMemoryLogger:
    """Decorator: log GPU memory before and after the function."""

    def __init__(self, role: str, logger: logging.Logger | None = None, level: int = logging.DEBUG) -> None:
        self.role, self.logger, self.level = role, logger, level

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            log_gpu_memory_usage(f"before {self.role} {function.__name__}", self.logger, self.level)
            output = function(*args, **kwargs)
            log_gpu_memory_usage(f"after {self.role} {function.__name__}", self.logger, self.level)
            return output

        return call
