"""verl.single_controller.base.worker"""

from lockstep.single_controller import Worker

__all__ = ["Worker"]
