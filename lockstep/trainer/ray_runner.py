"""A training job on Ray."""

from typing import TYPE_CHECKING

from lockstep.config.placement import num_workers
from lockstep.config.ppo import PPOConfig
from lockstep.single_controller.ray_backend import connect, disconnect

if TYPE_CHECKING:
    from lockstep.trainer.ppo.task_runner import TaskRunner


def run_on_ray(config: PPOConfig, task_runner_class: "type[TaskRunner] | None" = None) -> int:
    """Join or start a cluster and run the job there; returns its exit code."""
    from lockstep.trainer.ppo.task_runner import TaskRunner

    setup = config.ray_init
    connect(
        num_cpus=setup.num_cpus,
        address=setup.address,
        min_cpus=num_workers(config) + 1,
        runtime_env=setup.runtime_env,
    )
    try:
        return (task_runner_class or TaskRunner)().run(config)
    finally:
        disconnect(setup.timeline_json_file)
