"""The commands of SFT, reward models and DPO: one process, or as many as torchrun starts.

The config, folders, logins and user code are checked before torch is imported, so that errors are reported immediately.
"""

import io
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr

from lockstep.config.commandline import config_from_command_line
from lockstep.config.sft import SupervisedConfig
from lockstep.kernels.gpu_warmup import start_gpu_warmup
from lockstep.observability.console import LogHandler
from lockstep.trainer.run.errors import RunError, out_of_memory_as_run_error
from lockstep.trainer.run.inputs import fetch_inputs
from lockstep.trainer.run.interrupt import stop_on_sigterm
from lockstep.trainer.run.memory_check import check_memory
from lockstep.trainer.run.preflight import preflight
from lockstep.utils.imports import without_collections
from lockstep.utils.progress import ProgressLog, phase
from lockstep.utils.untrusted import printable

logger = logging.getLogger(__name__)

OTHERS_WAIT_S = 3.0
"""Ranks other than the first wait this long before they report an error: torchrun ends them once rank 0 has reported it."""


def run_training(config: SupervisedConfig) -> int:
    """Train, in this process or as one of torchrun's; returns 0, or 130 if it was stopped. RunError if it fails."""
    if _rank() == 0 and (problems := preflight(config)):
        raise RunError("\nerror: ".join(problems), exit_code=2)
    try:
        fetch_inputs(config)
        check_memory(config)
    except ValueError as error:
        raise RunError(str(error), exit_code=2) from error
    logger.info("loading torch and transformers")
    with ProgressLog():
        with phase("load torch and transformers"), without_collections():
            if os.environ.get("WORLD_SIZE", "1") == "1":  # else each rank would open a context on the first GPU
                start_gpu_warmup(config.trainer.device)
            from lockstep.trainer.supervised.runner import run
        return run(config)


def run_command(argv: Sequence[str] | None, cls: type[SupervisedConfig], prog: str, description: str) -> int:
    """Run the program that `cls` configures; returns its exit code."""
    level = logging.ERROR if _rank() else logging.INFO
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", handlers=[LogHandler()])
    try:
        with stop_on_sigterm(), out_of_memory_as_run_error():
            config = _config(argv, cls, prog, description)
            return 0 if config is None else run_training(config)
    except RunError as error:
        _report(f"error: {error}\n" if not _rank() else f"rank {_rank()}: error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        if not _rank():
            sys.stderr.write(
                "stopped by the user; run the same command to resume from the last checkpoint, if there is one\n"
            )
        return 130


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _config(
    argv: Sequence[str] | None, cls: type[SupervisedConfig], prog: str, description: str
) -> SupervisedConfig | None:
    errors = io.StringIO()
    try:
        with redirect_stderr(errors if _rank() else sys.stderr):
            return config_from_command_line(argv, cls, prog, description)
    except SystemExit:
        _report(errors.getvalue())
        raise


def _report(message: str) -> None:
    if _rank():
        time.sleep(OTHERS_WAIT_S)
    sys.stderr.write(printable(message))
