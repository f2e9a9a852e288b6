"""The command line of a program: config, signals, messages and exit codes. Imports no torch."""

import io
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import TypeVar

from lockstep.config.commandline import config_from_command_line
from lockstep.config.environment import RootConfig
from lockstep.observability.console import LogHandler
from lockstep.trainer.run.errors import RunError, out_of_memory_as_run_error
from lockstep.trainer.run.interrupt import stop_on_sigterm
from lockstep.utils.untrusted import printable

C = TypeVar("C", bound=RootConfig)

OTHERS_WAIT_S = 3.0
"""Ranks other than the first wait this long before they report an error: torchrun ends them once rank 0 has reported it."""


def run_program(
    argv: Sequence[str] | None,
    cls: type[C],
    run: Callable[[C], int],
    *,
    prog: str,
    description: str,
    if_stopped: str,
    rank: int = 0,
) -> int:
    """`run` with the configuration of `argv`; returns the exit code.

    if_stopped: what a user can do after Ctrl-C. rank: of torchrun's processes; the first one speaks for all.
    """
    level = logging.ERROR if rank else logging.INFO
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", handlers=[LogHandler()])
    try:
        with stop_on_sigterm(), out_of_memory_as_run_error():
            config = _config(argv, cls, prog, description, rank)
            return 0 if config is None else run(config)
    except RunError as error:
        _report(f"rank {rank}: error: {error}\n" if rank else f"error: {error}\n", rank)
        return error.exit_code
    except KeyboardInterrupt:
        if not rank:
            sys.stderr.write(f"stopped by the user{if_stopped}\n")
        return 130


def _config(argv: Sequence[str] | None, cls: type[C], prog: str, description: str, rank: int) -> C | None:
    errors = io.StringIO()
    try:
        with redirect_stderr(errors if rank else sys.stderr):
            return config_from_command_line(argv, cls, prog, description)
    except SystemExit:
        _report(errors.getvalue(), rank)
        raise


def _report(message: str, rank: int) -> None:
    if rank:
        time.sleep(OTHERS_WAIT_S)
    sys.stderr.write(printable(message))
