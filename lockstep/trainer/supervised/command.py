"""The commands of SFT, reward models and DPO: one process, or as many as torchrun starts.

The config, folders, logins and user code are checked before torch is imported, so that errors are reported immediately.
"""

import logging
import os
from collections.abc import Sequence

from lockstep.config.sft import SupervisedConfig
from lockstep.kernels.gpu_warmup import start_gpu_warmup
from lockstep.trainer.run.command import run_program
from lockstep.trainer.run.inputs import prepare_run
from lockstep.utils.imports import without_collections
from lockstep.utils.progress import ProgressLog, phase

logger = logging.getLogger(__name__)


def run_training(config: SupervisedConfig) -> int:
    """Train, in this process or as one of torchrun's; returns 0, or 130 if it was stopped. RunError if it fails."""
    prepare_run(config, with_preflight=_rank() == 0)
    logger.info("loading torch and transformers")
    with ProgressLog():
        with phase("load torch and transformers"), without_collections():
            if os.environ.get("WORLD_SIZE", "1") == "1":  # else each rank would open a context on the first GPU
                start_gpu_warmup(config.trainer.device)
            from lockstep.trainer.supervised.runner import run
        return run(config)


def run_command(argv: Sequence[str] | None, cls: type[SupervisedConfig], prog: str, description: str) -> int:
    """Run the program that `cls` configures; returns its exit code."""
    return run_program(
        argv,
        cls,
        run_training,
        prog=prog,
        description=description,
        if_stopped="; run the same command to resume from the last checkpoint, if there is one",
        rank=_rank(),
    )


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
