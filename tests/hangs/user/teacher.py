"""An interaction."""

from typing import Any

from lockstep.agents.interactions.interaction import BaseInteraction
from tests.hangs.plants import hang_there, is_now


class Teacher(BaseInteraction):
    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        if is_now("interaction"):
            await hang_there()
        return len(messages) > 3, "again", 0.5, {}
