"""Parse tool calls from a model's output, with one parser per tool-call format.

    response ids --decode--> text --parse--> (content, [FunctionCall, ...])

`content` is the text besides the calls. A malformed call is skipped, but counted by `count_calls`; parsers never raise, since the
text comes from a model. `actor_rollout_ref.rollout.multi_turn.format` selects the parser.
"""

import ast
import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lockstep.agents.schemas import OpenAIFunctionToolSchema
from lockstep.registry import Registry
from lockstep.utils.untrusted import JSON_ERRORS, valid_text

logger = logging.getLogger(__name__)

Tools = Sequence[OpenAIFunctionToolSchema]


@dataclass(frozen=True)
class FunctionCall:
    """One tool call of a model."""

    arguments: str
    """JSON text; unvalidated for `gpt-oss`, so it may be malformed."""
    name: str
    id: str = ""
    """As the model wrote it, which its result must repeat; empty if the format has none."""

    def __post_init__(self) -> None:
        for name in ("arguments", "name", "id"):
            object.__setattr__(self, name, valid_text(getattr(self, name)))


Parsed = tuple[str, list[FunctionCall]]


class ToolParser:
    """Base of the parsers: a subclass defines `parse`, or `extract_tool_calls` if it needs the token ids."""

    registry: ClassVar[Registry[type["ToolParser"]]] = Registry(
        "tool parser", key="actor_rollout_ref.rollout.multi_turn.format"
    )
    opening: ClassVar[str] = "<tool_call>"
    """Text that begins a call."""
    stop_token: ClassVar[str | None] = None
    """The token at which generation must stop, for models that do not stop after a call."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def register(cls, name: str) -> Callable[[type["ToolParser"]], type["ToolParser"]]:
        """Class decorator: register a parser under `name`."""
        return cls.registry.register(name)

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        return cls.registry.get(name)(tokenizer)

    @property
    def stop_token_ids(self) -> list[int]:
        """Extra stop token ids; usually none, since the model's EOS is enough."""
        if self.stop_token is None:
            return []
        token_id = self.tokenizer.convert_tokens_to_ids(self.stop_token)
        is_known = (
            isinstance(token_id, int) and token_id >= 0 and token_id != getattr(self.tokenizer, "unk_token_id", None)
        )
        return [token_id] if is_known else []

    async def extract_tool_calls(self, responses_ids: list[int], tools: Tools | None = None) -> Parsed:
        """The content and the calls of one response; `tools` has the argument types."""
        return self.parse(self.tokenizer.decode(responses_ids, skip_special_tokens=False), tools)

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        raise NotImplementedError(f"{type(self).__name__} must define `parse` or `extract_tool_calls`")

    def count_calls(self, text: str) -> int:
        """How many calls the text begins; more than are parsed if some are malformed."""
        return text.count(self.opening)

    def _without_padding(self, text: str) -> str:
        padding = getattr(self.tokenizer, "pad_token", None)
        return text.replace(padding, "") if padding else text


def _call(name: str, arguments: Any) -> FunctionCall:
    return FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _json_or_text(value: str) -> Any:
    value = value.strip()
    try:
        return json.loads(value)
    except JSON_ERRORS:
        return value


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        calls = []
        for block in self.BLOCK.findall(text):
            try:
                call = json.loads(block)
                name, arguments = call["name"], call["arguments"]
                if isinstance(name, str):
                    calls.append(_call(name, arguments))
            except (*JSON_ERRORS, KeyError, TypeError) as error:
                logger.debug("skipping a tool call that is not a JSON object with name and arguments: %r", error)
        return self.BLOCK.sub("", text), calls


@ToolParser.register("gpt-oss")
class GptOssToolParser(ToolParser):
    """Harmony channels: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    The analysis channel is the model's reasoning: it is removed, and calls in it are ignored.
    """

    opening = "to=functions."

    ANALYSIS = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>.*?<\|end\|>", re.DOTALL)
    CALL = re.compile(
        r"<\|start\|>assistant<\|channel\|>[^<]* to=functions\.([^<]+) <\|constrain\|>json<\|message\|>(.*?)<\|call\|>",
        re.DOTALL,
    )

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        text = self.ANALYSIS.sub("", self._without_padding(text))
        calls = [FunctionCall(name=name, arguments=arguments) for name, arguments in self.CALL.findall(text)]
        return self.CALL.sub("", text), calls


@ToolParser.register("qwen3_coder")
class Qwen3CoderToolParser(ToolParser):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`: Qwen3-Coder, Qwen3.5.

    Values are bare text, so their types come from the tool's schema; without one they stay text. Truncated blocks are
    parsed as far as possible.
    """

    opening = "<function="

    BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
    FUNCTION = re.compile(r"<function=(.*?)(?:</function>|$)", re.DOTALL)
    PARAMETER = re.compile(r"<parameter=(.*?)(?:</parameter>|$)", re.DOTALL)

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        functions = [function for block in self.BLOCK.findall(text) for function in self.FUNCTION.findall(block)]
        if not functions:
            return text, []
        calls = [call for function in functions if (call := self._parse_function(function, tools)) is not None]
        return text[: text.find("<tool_call>")], calls

    def _parse_function(self, function: str, tools: Tools | None) -> FunctionCall | None:
        name, closed, body = function.partition(">")
        if not closed:
            return None
        types = _parameter_types(name, tools)
        arguments = {}
        for parameter in self.PARAMETER.findall(body):
            key, closed, value = parameter.partition(">")
            if closed:
                arguments[key] = _typed_value(value.removeprefix("\n").removesuffix("\n"), types.get(key, "string"))
        return _call(name, arguments)


def _parameter_types(function: str, tools: Tools | None) -> dict[str, str]:
    for tool in tools or ():
        if tool.type == "function" and tool.function.name == function:
            return {key: str(value.type).strip().lower() for key, value in tool.function.parameters.properties.items()}
    return {}


def _typed_value(value: str, kind: str) -> Any:
    """Convert `value` to the schema's JSON type; text if that fails, false for an invalid boolean."""
    if value.lower() == "null":
        return None
    if kind in ("string", "str", "text", "varchar", "char", "enum"):
        return value
    if kind in ("boolean", "bool", "binary"):
        return value.lower() == "true"
    try:
        if kind.startswith(("int", "uint", "long", "short", "unsigned")):
            return int(value)
        if kind.startswith(("num", "float")):
            number = float(value)
            return int(number) if number == int(number) else number
        return _object_value(value, is_object=kind == "object" or kind.startswith("dict"))
    except (ValueError, OverflowError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value


def _object_value(value: str, is_object: bool) -> Any:
    """Parse an array or object, written as JSON or as a Python literal."""
    if is_object:
        try:
            return json.loads(value)
        except JSON_ERRORS:
            pass
    literal = ast.literal_eval(value)
    json.dumps(literal)  # TypeError for non-JSON types such as a set
    return literal


@ToolParser.register("glm")
class GlmToolParser(ToolParser):
    """`<tool_call>NAME<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`: GLM-4.5 and later."""

    BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
    ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
    stop_token = "<|observation|>"

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        if "<tool_call>" not in text or "</tool_call>" not in text:
            return text, []
        calls = []
        for block in self.BLOCK.findall(text):
            name = block.partition("<arg_key>")[0].strip()
            arguments = {key.strip(): _json_or_text(value) for key, value in self.ARGUMENT.findall(block)}
            calls.append(_call(name, arguments))
        return _without_thinking(text[: text.find("<tool_call>")]), calls


def _without_thinking(content: str) -> str:
    content = re.sub(r"\A\s*<think>.*?</think>", "", content, flags=re.DOTALL)
    return re.sub(r"\A\s*</think>", "", content)


class _InvokeParser(ToolParser):
    """Calls as nested tags in a block; subclasses differ only in the tag names.

    BLOCK, CALL and PARAMETER each capture their content; CALL and PARAMETER capture the name first.
    """

    START: ClassVar[re.Pattern[str]]
    BLOCK: ClassVar[re.Pattern[str]]
    CALL: ClassVar[re.Pattern[str]]
    PARAMETER: ClassVar[re.Pattern[str]]

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        blocks = self.BLOCK.findall(text)
        start = self.START.search(text)
        if not blocks or start is None:
            return text, []
        calls = [
            _call(name.strip(), {key.strip(): self._value(*rest) for key, *rest in self.PARAMETER.findall(body)})
            for block in blocks
            for name, body in self._calls(block)
        ]
        return text[: start.start()], calls

    def _calls(self, block: str) -> list[tuple[str, str]]:
        return self.CALL.findall(block)

    def _value(self, value: str) -> Any:
        return _json_or_text(value)


@ToolParser.register("seed")
class SeedToolParser(_InvokeParser):
    """`<seed:tool_call><function=NAME><parameter=KEY>value</parameter></function></seed:tool_call>`, one per block."""

    opening = "<seed:tool_call>"

    START = re.compile(r"<seed:tool_call>")
    BLOCK = re.compile(r"<seed:tool_call>(.*?)</seed:tool_call>", re.DOTALL)
    CALL = re.compile(r"<function=([^>\n]+)>\s*(.*?)</function>", re.DOTALL)
    PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)

    def _calls(self, block: str) -> list[tuple[str, str]]:
        return super()._calls(block)[:1]


@ToolParser.register("minimax")
class MiniMaxToolParser(_InvokeParser):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke></minimax:tool_call>`."""

    opening = "<invoke name="

    START = re.compile(r"<minimax:tool_call>")
    BLOCK = re.compile(r"<minimax:tool_call>(.*?)</minimax:tool_call>", re.DOTALL)
    CALL = re.compile(r'<invoke name="([^"]+)">\s*(.*?)</invoke>', re.DOTALL)
    PARAMETER = re.compile(r'<parameter name="([^"]+)">(.*?)</parameter>', re.DOTALL)


@ToolParser.register("deepseek_v4")
class DeepSeekToolParser(_InvokeParser):
    """DSML: `<｜DSML｜tool_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">value...`.

    `string` is true if the value is text, else it is JSON. V3.2 names the block `function_calls`.
    """

    opening = "<｜DSML｜invoke name="

    START = re.compile(r"<｜DSML｜(?:tool|function)_calls>")
    BLOCK = re.compile(r"<｜DSML｜(?:tool|function)_calls>(.*?)</｜DSML｜(?:tool|function)_calls>", re.DOTALL)
    CALL = re.compile(r'<｜DSML｜invoke name="([^"]+)">\s*(.*?)</｜DSML｜invoke>', re.DOTALL)
    PARAMETER = re.compile(
        r'<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</｜DSML｜parameter>', re.DOTALL
    )

    def _value(self, is_text: str, value: str) -> Any:  # type: ignore[override]
        return value if is_text == "true" else _json_or_text(value)


@ToolParser.register("kimi")
class KimiToolParser(ToolParser):
    """`<|tool_call_begin|>ID<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section: Kimi K2.

    ID is `functions.NAME:INDEX`; models do not always follow this, so the name is matched against the tools.
    """

    opening = "<|tool_call_begin|>"

    SECTION = "<|tool_calls_section_begin|>"
    CALL = re.compile(
        r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
        re.DOTALL,
    )
    stop_token = "<|im_end|>"

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        if self.SECTION not in text:
            return text, []
        calls = []
        for call_id, body in self.CALL.findall(text):
            arguments = _json_or_text(body)
            if not isinstance(arguments, dict):
                logger.debug("the arguments of tool call %r are not a JSON object; using none", call_id)
                arguments = {}
            written = call_id.strip()
            calls.append(replace(_call(_kimi_name(written, arguments, tools), arguments), id=written))
        return text[: text.find(self.SECTION)], calls


def _kimi_name(call_id: str, arguments: dict[str, Any], tools: Tools | None) -> str:
    """The tool of a call id: the one it contains, else the only one whose required arguments are all given."""
    functions = [tool.function for tool in tools or () if tool.type == "function"]
    if call_id in (function.name for function in functions):
        return call_id
    written = call_id.lower().replace("-", "_")
    named = [function.name for function in functions if function.name.lower() in written]
    if len(named) == 1:
        return named[0]
    fitting = [f.name for f in functions if f.parameters.required and set(f.parameters.required) <= arguments.keys()]
    return fitting[0] if len(fitting) == 1 else call_id


@ToolParser.register("gemma4")
class Gemma4ToolParser(ToolParser):
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,key2:5}<tool_call|>`: Gemma 4; values nest in `{}` and `[]`."""

    opening = "<|tool_call>"

    CALL = re.compile(r"<\|tool_call>call:(\w+)\{(.*?)\}<tool_call\|>", re.DOTALL)
    stop_token = "<tool_call|>"

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        text = self._without_padding(text)
        calls = []
        for name, body in self.CALL.findall(text):
            with suppress(RecursionError):
                calls.append(_call(name, _GemmaValues(body).arguments()))
        return (text[: text.find("<|tool_call>")] if calls else text), calls


class _GemmaValues:
    """Reads Gemma's notation from left to right; unexpected characters are skipped."""

    QUOTED = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
    KEY = re.compile(r"(\w+):")
    BARE = re.compile(r"[^,}\]]*")

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def arguments(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while self.at < len(self.text) and self.text[self.at] != "}":
            key = self._take(self.KEY)
            if key is None:
                self.at += 1
            else:
                values[key] = self._value()
        self.at += 1
        return values

    def _array(self) -> list[Any]:
        values = []
        while self.at < len(self.text) and self.text[self.at] != "]":
            if self.text[self.at] in ", ":
                self.at += 1
            else:
                before = self.at
                values.append(self._value())
                self.at = max(self.at, before + 1)
        self.at += 1
        return values

    def _value(self) -> Any:
        opening = self.text[self.at : self.at + 1]
        if opening in ("{", "["):
            self.at += 1
            return self.arguments() if opening == "{" else self._array()
        quoted = self._take(self.QUOTED)
        return quoted if quoted is not None else _bare_value(self._take(self.BARE, group=0) or "")

    def _take(self, pattern: re.Pattern[str], group: int = 1) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match.group(group)


def _bare_value(value: str) -> Any:
    value = value.strip()
    named = {"true": True, "false": False, "null": None}
    if value.lower() in named:
        return named[value.lower()]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _objects(text: str) -> list[tuple[int, int, Any]]:
    """The outermost JSON objects and arrays of a text: start, end, value."""
    decoder = json.JSONDecoder()
    found = []
    at = 0
    while (match := re.compile(r"[{\[]").search(text, at)) is not None:
        try:
            value, end = decoder.raw_decode(text, match.start())
        except JSON_ERRORS:
            at = match.end()
            continue
        found.append((match.start(), end, value))
        at = end
    return found


def _json_call(value: Any) -> FunctionCall | None:
    """A call as an object with `name` and `arguments` or `parameters`, which may be JSON text themselves."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return FunctionCall(name=value["name"], arguments=arguments)
    return None if arguments is None else _call(value["name"], arguments)


@ToolParser.register("llama3_json")
class Llama3JsonToolParser(ToolParser):
    """`{"name": NAME, "parameters": {...}}`, several with `;` between them, after an optional `<|python_tag|>`: Llama 3.1+."""

    opening = '"name"'

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        found = [(start, call) for start, _, value in _objects(text) if (call := _json_call(value)) is not None]
        content = text[: found[0][0]].replace("<|python_tag|>", "") if found else text
        return content, [call for _, call in found]


@ToolParser.register("mistral")
class MistralToolParser(ToolParser):
    """`[TOOL_CALLS] [{"name": NAME, "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` of later models."""

    opening = "[TOOL_CALLS]"
    LATER = re.compile(r"\s*([\w.-]+)\[ARGS\]")

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        content, *parts = text.split(self.opening)
        calls: list[FunctionCall | None] = []
        for part in parts:
            values = [value for _, _, value in _objects(part)][:1]
            if name := self.LATER.match(part):
                calls += [_call(name.group(1), value) for value in values if isinstance(value, dict)]
            else:
                calls += [
                    _json_call(call) for value in values for call in (value if isinstance(value, list) else [value])
                ]
        return content, [call for call in calls if call is not None]


@ToolParser.register("deepseek_v3")
class DeepSeekV3ToolParser(ToolParser):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` and the arguments in a JSON fence (V3, R1), or
    `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}` (V3.1), each up to `<｜tool▁call▁end｜>`."""

    opening = "<｜tool▁call▁begin｜>"
    CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        calls = []
        for name, body in self.CALL.findall(text):
            if "```" in body and name.strip() == "function":
                name, body = body.split("```", 1)
            values = [value for _, _, value in _objects(body) if isinstance(value, dict)]
            if values:
                calls.append(_call(name.strip(), values[0]))
        start = min(
            (at for mark in ("<｜tool▁calls▁begin｜>", self.opening) if (at := text.find(mark)) >= 0), default=None
        )
        return text[:start], calls


@ToolParser.register("openai")
class OpenAIToolParser(ToolParser):
    """A message of OpenAI's API as text: `{"tool_calls": [{"function": {"name": NAME, "arguments": "{...}"}}]}`."""

    opening = '"function"'

    def parse(self, text: str, tools: Tools | None = None) -> Parsed:
        calls: list[FunctionCall] = []
        content = text
        for start, _, value in _objects(text):
            entries = value.get("tool_calls") if isinstance(value, dict) else None
            found = [e.get("function") for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
            if found and not calls:
                content = text[:start] + str(value.get("content") or "")
            calls += [call for function in found if (call := _json_call(function)) is not None]
        return content, calls
