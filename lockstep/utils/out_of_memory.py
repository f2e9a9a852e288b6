"""Which errors say that memory was refused. Imports no torch."""

import errno
import re

_NO_MEMORY = re.compile(
    r"can't allocate|cannot allocate memory|out of memory|can't start new thread|failed to launch worker thread|"
    r"ThreadPoolBuildError|bad_alloc|failed to map segment|CUBLAS_STATUS_ALLOC_FAILED",
    re.I,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, or a thread, was refused by the system, a limit of the process or a GPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ValueError | SystemExit):  # written for the user
        return False
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None
