"""verl.single_controller.base"""

from lockstep.single_controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from lockstep.verl.single_controller.base.worker import Worker

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
