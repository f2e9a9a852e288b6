"""The interface of interactions: the other side of a conversation, such as a user who comments on an answer."""

import uuid
from collections.abc import Mapping
from typing import Any

from lockstep.registry import Registry


class BaseInteraction:
    """Answers the policy's turns in place of a user.

    There is one object per entry of the interaction config; a conversation is an instance of it, named by an id:

        start_interaction ─► generate_response after each turn ─► finalize_interaction
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.name: str = config.get("name", "interaction")

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """ValueError if a row's `interaction_kwargs` lack something; called for every row before training."""

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation. kwargs: the row's `interaction_kwargs` without `name`."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """After a turn: whether the conversation ends, the user's message, the turn's score, and anything else."""
        raise NotImplementedError(f"{type(self).__name__} must define `generate_response`")

    async def calculate_score(self) -> float:
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End the conversation."""


INTERACTIONS: Registry[type[BaseInteraction]] = Registry("interaction", key="class_name")
