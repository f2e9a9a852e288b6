"""Agent loops. The untrained model ends no turn by itself, so that every token ends one."""

from types import SimpleNamespace
from typing import Any

from lockstep.agents.conversation import Conversation, Turn
from lockstep.agents.loops.tool_agent import ToolAgent
from lockstep.agents.tool_parser import FunctionCall
from tests.hangs.plants import hang_here, is_now, note_pid


class CallsTool(ToolAgent):
    """The first turn calls the first tool."""

    def __init__(self, setup: Any, **options: Any) -> None:
        super().__init__(setup, **options)
        self.parser: Any = SimpleNamespace(stop_token_ids=range(259))

    async def _parse(self, conversation: Conversation, turn: Turn) -> tuple[list[FunctionCall], int]:
        note_pid("agent")
        if is_now("loop"):
            hang_here()
        if conversation.num_assistant_turns > 1:
            return [], 0
        return [FunctionCall(name=name, arguments='{"x": 1}') for name in list(self.setup.tools)[:1]], 0


class TalksToTeacher(CallsTool):
    """The teacher answers each turn."""

    async def _parse(self, conversation: Conversation, turn: Turn) -> tuple[list[FunctionCall], int]:
        return [], 0
