"""How a training run fails: one exception, whose text is one line for the user. Imports no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lockstep.utils.out_of_memory import is_out_of_memory


class RunError(RuntimeError):
    """A run that could not start, or ended early.

    exit_code: of the command: 2 for wrong config or input, 3 for a run that was stuck (`trainer.on_hang`), otherwise 1.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


def raise_as_run_error(error: ValueError, message: str) -> NoReturn:
    """A wrong config or input, as a RunError; LOCKSTEP_DEBUG=1 raises the error itself."""
    if os.environ.get("LOCKSTEP_DEBUG"):
        raise error
    raise RunError(f"{message} (LOCKSTEP_DEBUG=1 shows the traceback)", exit_code=2) from error


@contextmanager
def out_of_memory_as_run_error() -> Iterator[None]:
    """For the parts of a program outside the run itself, such as the import of torch."""
    try:
        yield
    except BaseException as error:  # a panic of Rust code, such as a tokenizer's, is no Exception
        if os.environ.get("LOCKSTEP_DEBUG") or isinstance(error, RunError) or not is_out_of_memory(error):
            raise
        first_line = str(error).partition("\n")[0] or "MemoryError"
        raise RunError(f"out of memory ({first_line}); raise the limit (ulimit -v)") from error
