"""Agents: conversations of the policy with tools and users, as token-exact trajectories."""

from typing import Any

_LOOPS = ("AgentLoop", "AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "register")


def __getattr__(name: str) -> Any:
    """What a file with an own loop imports; on first use, because the config is checked without them."""
    if name not in _LOOPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lockstep.agents import loops

    return getattr(loops, name)
