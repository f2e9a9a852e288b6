"""verl.experimental.agent_loop.agent_loop"""

from lockstep.verl._names import exports
from lockstep.verl.experimental.agent_loop import NAMES

__getattr__ = exports(__name__, {"lockstep.agents.loops": NAMES})
