"""Train with reinforcement learning: `python -m lockstep.trainer.main_ppo key=value …`, or `lockstep ppo key=value …`.

The config, folders, logins and user code are checked before torch is imported, so that errors are reported immediately.
"""

import logging
import sys
from typing import TYPE_CHECKING

from lockstep.config.placement import controller_of
from lockstep.config.ppo import PPOConfig
from lockstep.kernels.gpu_warmup import start_gpu_warmup
from lockstep.trainer.run.command import run_program
from lockstep.trainer.run.inputs import prepare_run
from lockstep.trainer.run.interrupt import OnStep
from lockstep.utils.imports import without_collections
from lockstep.utils.progress import ProgressLog, phase

if TYPE_CHECKING:
    from lockstep.trainer.ppo.task_runner import TaskRunner

logger = logging.getLogger(__name__)


def run_ppo(
    config: PPOConfig, task_runner_class: "type[TaskRunner] | None" = None, on_step: OnStep | None = None
) -> int:
    """Run a training job, in this process or on Ray; returns 0, or 130 if it was stopped. RunError if it fails.

    on_step: called in this process with the metrics of each step; see `OnStep`.
    """
    prepare_run(config)
    if controller_of(config) == "ray":
        from lockstep.trainer.run.ray_runner import run_on_ray

        logger.info("connecting to Ray, or starting it on this machine")
        return run_on_ray(config, task_runner_class, on_step)
    logger.info("loading torch and transformers")
    with ProgressLog(), phase("load torch and transformers"), without_collections():
        start_gpu_warmup(config.trainer.device)
        from lockstep.trainer.ppo.task_runner import TaskRunner

    runner = (task_runner_class or TaskRunner)()
    runner.on_step = on_step
    return runner.run(config)


def main(argv: list[str] | None = None, prog: str = "lockstep ppo") -> int:
    """prog: the program's name in its help."""
    return run_program(
        argv,
        PPOConfig,
        run_ppo,
        prog=prog,
        description="Train a language model by reinforcement learning.",
        if_stopped="; run the same command to resume from the last checkpoint, if there is one",
    )


if __name__ == "__main__":
    sys.exit(main())
