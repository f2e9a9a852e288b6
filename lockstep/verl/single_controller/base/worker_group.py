"""verl.single_controller.base.worker_group"""

from lockstep.single_controller import (
    ClassWithInitArgs as ClassWithInitArgs,
    ResourcePool as ResourcePool,
    WorkerGroup as WorkerGroup,
)
