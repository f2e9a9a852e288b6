"""Agent loops; the built-in ones register here."""

from lockstep.agents.loops.agent_loop import (
    AGENT_LOOPS as AGENT_LOOPS,
    AgentLoop as AgentLoop,
    Setup as Setup,
    SingleTurnAgent as SingleTurnAgent,
    register as register,
)
from lockstep.agents.loops.agent_loop_base import (
    AgentLoopBase as AgentLoopBase,
    AgentLoopMetrics as AgentLoopMetrics,
    AgentLoopOutput as AgentLoopOutput,
)
from lockstep.agents.loops.program_agent import ProgramAgent as ProgramAgent
from lockstep.agents.loops.react_agent import ReactAgent as ReactAgent
from lockstep.agents.loops.tool_agent import AgentState as AgentState, ToolAgent as ToolAgent
