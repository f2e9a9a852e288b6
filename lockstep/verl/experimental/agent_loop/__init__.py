"""verl.experimental.agent_loop: loops, the manager that runs them on the rollout's workers, and the parsers of tool calls."""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.agents.loops": ("AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "register"),
        "lockstep.verl.experimental.agent_loop.agent_loop": (
            "AgentLoopManager",
            "AgentLoopWorker",
            "AsyncLLMServerManager",
            "get_trajectory_info",
        ),
        "lockstep.verl.experimental.agent_loop.single_turn_agent_loop": ("SingleTurnAgentLoop",),
        "lockstep.verl.experimental.agent_loop.tool_agent_loop": ("ToolAgentLoop",),
    },
)
