"""verl.workers.rollout.replica"""

from lockstep.agents.loops.agent_loop_base import TokenOutput
from lockstep.verl._names import exports

__all__ = ["TokenOutput"]

__getattr__ = exports(__name__)
