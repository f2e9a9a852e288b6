"""verl.experimental.agent_loop: the base class of loops, and the parsers of tool calls."""

from lockstep.verl._names import exports

NAMES = ("AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "register")

__getattr__ = exports(__name__, {"lockstep.agents.loops": NAMES})
