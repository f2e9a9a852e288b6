"""The command line of a program in one process: config, signals, messages and exit codes. Imports no torch."""

import logging
import sys
from collections.abc import Callable
from typing import TypeVar

from lockstep.config.commandline import config_from_command_line
from lockstep.config.environment import RootConfig
from lockstep.observability.console import LogHandler
from lockstep.trainer.run.errors import RunError, out_of_memory_as_run_error
from lockstep.trainer.run.interrupt import stop_on_sigterm
from lockstep.utils.untrusted import printable

C = TypeVar("C", bound=RootConfig)


def run_program(
    argv: list[str] | None, cls: type[C], run: Callable[[C], int], *, prog: str, description: str, if_stopped: str
) -> int:
    """`run` with the configuration of `argv`; returns the exit code. if_stopped: what a user can do after Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", handlers=[LogHandler()])
    try:
        with stop_on_sigterm(), out_of_memory_as_run_error():
            config = config_from_command_line(argv, cls, prog, description)
            return 0 if config is None else run(config)
    except RunError as error:
        sys.stderr.write(printable(f"error: {error}\n"))
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(f"stopped by the user{if_stopped}\n")
        return 130
