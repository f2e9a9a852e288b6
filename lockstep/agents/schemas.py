"""OpenAI function-calling schemas: tool descriptions, tool calls and tool responses.

tool description (YAML, dict) --model_validate--> OpenAIFunctionToolSchema --model_dump--> the chat template's `tools`
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_type_hints

from lockstep.utils.untrusted import JSON_ERRORS


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments from its JSON text; what is no JSON object becomes one, with its value as `arguments`."""
    try:
        value = json.loads(arguments)
    except JSON_ERRORS:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


@dataclass
class Schema:
    """Base of the schemas: validated conversion from and to plain data."""

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """Build an instance from a mapping (or return an instance); errors name a missing or wrong field."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise ValueError(f"{cls.__name__} must be built from a mapping, not {type(data).__name__}")
        hints = get_type_hints(cls)
        known = {entry.name: entry for entry in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, entry in known.items():
            if name in data and name != "extra":
                values[name] = cls._field(name, hints[name], data[name])
            elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
                raise ValueError(f"{cls.__name__} has no {name!r} (fields: {', '.join(map(str, data))})")
        if "extra" in known:
            values["extra"] = {name: value for name, value in data.items() if name not in known}
        return cls(**values)

    @classmethod
    def _field(cls, name: str, annotation: Any, value: Any) -> Any:
        if isinstance(annotation, type) and issubclass(annotation, Schema):
            return annotation.model_validate(value)
        return value

    def model_dump(self, exclude_unset: bool = False, exclude_none: bool = False) -> dict[str, Any]:
        """Convert to plain data. `exclude_unset` skips fields equal to their default, `exclude_none` None values."""
        plain: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.name == "extra":
                plain |= value
            elif not (exclude_none and value is None) and not (exclude_unset and _is_default(entry, value)):
                plain[entry.name] = _dump(value, exclude_unset, exclude_none)
        return plain


def _is_default(entry: "dataclasses.Field[Any]", value: Any) -> bool:
    if entry.default_factory is not dataclasses.MISSING:
        return bool(value == entry.default_factory())
    return entry.default is not dataclasses.MISSING and bool(value == entry.default)


def _dump(value: Any, exclude_unset: bool, exclude_none: bool) -> Any:
    if isinstance(value, Schema):
        return value.model_dump(exclude_unset, exclude_none)
    if isinstance(value, Mapping):
        return {name: _dump(item, exclude_unset, exclude_none) for name, item in value.items()}
    return [_dump(item, exclude_unset, exclude_none) for item in value] if isinstance(value, list) else value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


TYPE_KEYS = {"anyOf", "oneOf", "allOf", "$ref", "const"}
"""Keys of JSON schema that say which values are allowed, in place of `type`."""


@dataclass
class OpenAIFunctionPropertySchema(Schema):
    """One parameter of a function; `type` may be missing only if another key says it, such as `anyOf`."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Further JSON-schema keys (`items`, `properties`, `default`, ...), passed on to the model."""

    def __post_init__(self) -> None:
        is_given = isinstance(self.type, str | list) or (self.type is None and bool(TYPE_KEYS & {*self.extra}))
        _require(is_given or self.enum is not None, f"a parameter's `type` must be text, not {self.type!r}")


@dataclass
class OpenAIFunctionParametersSchema(Schema):
    """The parameters of a function, by name."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str]
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.required = list(self.required or [])
        _require(isinstance(self.properties, Mapping), "`properties` must be a mapping of parameters")
        self.properties = {
            name: OpenAIFunctionPropertySchema.model_validate(value) for name, value in self.properties.items()
        }
        unknown = [name for name in self.required if name not in self.properties]
        _require(not unknown, f"`required` has {unknown}, which `properties` does not have")


def _no_parameters() -> OpenAIFunctionParametersSchema:
    return OpenAIFunctionParametersSchema(type="object", properties={}, required=[])


@dataclass
class OpenAIFunctionSchema(Schema):
    """A function that a model may call."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = field(default_factory=_no_parameters)
    strict: bool = False

    def __post_init__(self) -> None:
        _require(isinstance(self.name, str) and bool(self.name), f"a function's `name` must be text, not {self.name!r}")


@dataclass
class OpenAIFunctionToolSchema(Schema):
    """A tool as passed to the chat template."""

    type: str
    function: OpenAIFunctionSchema


@dataclass
class OpenAIFunctionParsedSchema(Schema):
    """A call as the model wrote it."""

    name: str
    arguments: str
    """JSON text, not validated."""


@dataclass
class OpenAIFunctionCallSchema(Schema):
    """A call with parsed arguments."""

    name: str
    arguments: dict[str, Any]

    @classmethod
    def from_openai_function_parsed_schema(cls, parsed_schema: OpenAIFunctionParsedSchema) -> tuple[Self, bool]:
        """The call, and whether parsing its arguments failed (they are then empty)."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except JSON_ERRORS:
            arguments = None
        failed = not isinstance(arguments, dict)
        return cls(name=parsed_schema.name, arguments={} if failed else arguments), failed


@dataclass
class OpenAIFunctionToolCall(Schema):
    """A call within an assistant message."""

    id: str
    function: OpenAIFunctionCallSchema
    type: Literal["function"] = "function"


@dataclass
class ToolResponse(Schema):
    """The response of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("image", "video"):
            value = getattr(self, name)
            _require(
                value is None or isinstance(value, list),
                f"ToolResponse.{name} must be a list of {name}s, not {type(value).__name__}; write [{name}]",
            )

    def is_empty(self) -> bool:
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video
