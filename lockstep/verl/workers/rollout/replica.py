"""verl.workers.rollout.replica"""

from lockstep.agents.loops.agent_loop_base import TokenOutput as TokenOutput
from lockstep.verl._names import exports

__getattr__ = exports(__name__)
