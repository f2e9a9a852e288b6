"""verl.workers.rollout: requests to the rollout's workers."""

from lockstep.verl._names import exports

__getattr__ = exports(__name__)
