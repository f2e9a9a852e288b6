"""Plain Python as tools: functions, and classes whose public methods are the tools of one conversation.

The schema comes from type hints and a docstring with an `Args:` section:

    def multiply(a: int, b: int) -> int:
        '''Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        '''
        return a * b
"""

import inspect
import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.agents.schemas import OpenAIFunctionToolSchema, ToolResponse
from lockstep.agents.tools.tool import BaseTool, Executed
from lockstep.registry import defined_at

ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+>")
"""In the text of objects that have none of their own."""


class FunctionTool(BaseTool):
    """A function; a coroutine function is awaited."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        super().__init__({}, schema_of(function))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        return await _answer(self.function, parameters), None, {}


class Environment:
    """A class whose public methods are tools; each conversation has an object of it.

    reset(**kwargs): called before the first tool, with those fields of the row that it has parameters for (`ground_truth`,
                     `data_source`, `prompt` and the fields of `extra_info`), and the tool's `create_kwargs`.
    get_reward():    the conversation's reward, when it has ended. Both are optional and no tools; coroutines are awaited.
    """

    NOT_TOOLS = ("reset", "get_reward")

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self._objects: dict[str, Any] = {}
        self._rewarded: set[str] = set()
        names = [name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]
        self.tools = [MethodTool(self, name) for name in names if name not in self.NOT_TOOLS]
        if not self.tools:
            raise ValueError(f"{cls.__qualname__} has no public methods, so it offers no tools")

    def reset_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a row that `reset` has parameters for."""
        fields = {
            **(row.get("extra_info") or {}),
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "data_source": row.get("data_source"),
            "prompt": row.get("raw_prompt"),
        }
        parameters = inspect.signature(getattr(self.cls, "reset", lambda: None)).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return fields
        return {name: value for name, value in fields.items() if name in parameters}

    async def begin(self, instance_id: str, kwargs: dict[str, Any]) -> None:
        """Make the conversation's object; no-op if another of its tools has."""
        if instance_id not in self._objects:
            new = self.cls()
            if hasattr(new, "reset"):
                await _awaited(new.reset(**kwargs))
            self._objects[instance_id] = new

    def object_of(self, instance_id: str) -> Any:
        return self._objects[instance_id]

    async def reward_of(self, instance_id: str) -> float:
        """The conversation's reward; 0 for all but the first of its tools that ask, so that it counts once."""
        found = self._objects[instance_id]
        if instance_id in self._rewarded or not hasattr(found, "get_reward"):
            return 0.0
        self._rewarded.add(instance_id)
        return float(await _awaited(found.get_reward()))

    def release(self, instance_id: str) -> None:
        self._objects.pop(instance_id, None)
        self._rewarded.discard(instance_id)


class MethodTool(BaseTool):
    """A method of an environment."""

    def __init__(self, environment: Environment, method: str) -> None:
        self.environment = environment
        self.method = method
        super().__init__({}, schema_of(getattr(environment.cls, method)))

    def create_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return self.environment.reset_arguments(row)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid.uuid4())
        await self.environment.begin(instance_id, kwargs)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        method = getattr(self.environment.object_of(instance_id), self.method)
        return await _answer(method, parameters), None, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return await self.environment.reward_of(instance_id)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.environment.release(instance_id)


@dataclass(frozen=True)
class ToolList:
    """Functions and classes that are the tools of a run, as `lockstep.train` passes them."""

    items: tuple[Callable[..., Any], ...]


def tools_of(found: Any) -> list[BaseTool]:
    """The tools of a function, a class or a list of them."""
    if isinstance(found, ToolList):
        return [tool for item in found.items for tool in tools_of(item)]
    if not callable(found):
        raise ValueError(f"must be a function or a class, not {found!r}")
    return list(Environment(found).tools) if inspect.isclass(found) else [FunctionTool(found)]


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _answer(function: Callable[..., Any], parameters: dict[str, Any]) -> ToolResponse:
    result = await _awaited(function(**parameters))
    if isinstance(result, bytes | bytearray | memoryview):
        raise TypeError("the tool returned bytes, not text")
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False, default=_as_text)
    return ToolResponse(text=result)


def _as_text(value: Any) -> str:
    """A value that JSON lacks, such as a date; TypeError if its text is only the address of an object."""
    text = str(value)
    if ADDRESS.search(text):
        raise TypeError(f"the tool returned an object of {type(value).__name__}, not text or data")
    return text


def schema_of(function: Callable[..., Any]) -> OpenAIFunctionToolSchema:
    """The schema of a function; ValueError if its type hints or docstring do not give one."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"{defined_at(function)} cannot be a tool: {error}. It needs type hints, and a docstring with a description and an "
            "`Args:` section"
        ) from error
    schema["function"].pop("return", None)
    schema["function"]["parameters"].setdefault("required", [])
    return OpenAIFunctionToolSchema.model_validate(schema)
