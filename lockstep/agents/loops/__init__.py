"""Agent loops; the built-in ones register here."""

from lockstep.agents.loops.agent_loop import AGENT_LOOPS, AgentLoop, Setup, SingleTurnAgent, register
from lockstep.agents.loops.agent_loop_base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from lockstep.agents.loops.program_agent import ProgramAgent
from lockstep.agents.loops.react_agent import ReactAgent
from lockstep.agents.loops.tool_agent import AgentState, ToolAgent

__all__ = [
    "AGENT_LOOPS",
    "AgentLoop",
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentState",
    "ProgramAgent",
    "ReactAgent",
    "Setup",
    "SingleTurnAgent",
    "ToolAgent",
    "register",
]
