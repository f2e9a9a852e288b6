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
    return refusal_in(error) is not None


def refusal_in(error: BaseException) -> BaseException | None:
    """The error that says so: `error`, or the one it was raised from or during (a failed graph capture fails again as it ends)."""
    found: BaseException | None = error
    while found is not None and not _says_so(found):
        if isinstance(found, OSError | ValueError | SystemExit | KeyboardInterrupt):  # for or by the user
            return None
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return found


def _says_so(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ValueError | SystemExit):
        return False
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None
