"""verl.single_controller.base.worker_group"""

from lockstep.single_controller import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup"]
