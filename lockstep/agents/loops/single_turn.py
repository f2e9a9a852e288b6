"""`single_turn_agent`: one response to the prompt."""

from lockstep.agents.conversation import Conversation
from lockstep.agents.loops.agent_loop import AgentLoop, register


@register("single_turn_agent")
class SingleTurnAgent(AgentLoop):
    async def run(self, conversation: Conversation) -> None:
        await conversation.generate()
