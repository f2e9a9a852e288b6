"""verl.single_controller.base"""

from lockstep.single_controller import (
    ClassWithInitArgs as ClassWithInitArgs,
    ResourcePool as ResourcePool,
    WorkerGroup as WorkerGroup,
)
from lockstep.verl.single_controller.base.worker import Worker as Worker
