"""The interface of tools, and the registry of the built-in ones."""

import uuid
from collections.abc import Mapping
from typing import Any

from lockstep.agents.schemas import OpenAIFunctionToolSchema, ToolResponse
from lockstep.registry import Registry

Executed = tuple[ToolResponse, float | None, dict[str, Any]]
"""What `execute` returns: the response, its reward (None: none) and metrics."""


def tool_schema(name: str, description: str, **parameters: dict[str, Any]) -> OpenAIFunctionToolSchema:
    """The schema of a tool, by the JSON schemas of its parameters; all are required."""
    accepted = {"type": "object", "properties": parameters, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": accepted}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


class BaseTool:
    """A tool that the policy can call.

    There is one object per entry of the tool config; a conversation is an instance of it, named by an id:

        create ─► execute, as often as the policy calls it ─► calc_reward ─► release

    `create` runs before the first call of a conversation. Each method runs in its own thread and event loop and
    under a deadline (`multi_turn.tool_timeout_s`), so a tool may block; it must not keep objects that belong to an event loop.
    What a method raises ends no other conversation: the policy reads it as an error message.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = dict(config)
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    @property
    def label(self) -> str:
        """Its name in messages and reports."""
        return self.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema, if the config has none."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise ValueError(f"{type(self).__name__} has no schema: add tool_schema to its entry")
        return schema

    def create_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `create` that come from the row itself; its `create_kwargs` override them."""
        return {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a conversation. kwargs: `create_kwargs` of the row's `tools_kwargs`."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Answer a call. kwargs: the row's `execute_kwargs`."""
        raise NotImplementedError(f"{type(self).__name__} must define `execute`")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Reward of the conversation, when it has ended. kwargs: the row's `calc_reward_kwargs`."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the conversation. kwargs: the row's `release_kwargs`."""

    def close(self) -> None:
        """Free what the tool itself keeps, at the end of the run."""


TOOLS: Registry[type[BaseTool]] = Registry("tool", key="class_name")
