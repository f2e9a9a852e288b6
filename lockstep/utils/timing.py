"""Wall-clock time of the phases of a step, collected in a dict."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the block's duration in seconds to `timing_raw[name]`, even if it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start
