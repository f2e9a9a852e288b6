"""Tool calls in each model's format: parsed if complete, skipped if not, never an exception."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.agents.schemas import OpenAIFunctionToolSchema
from lockstep.agents.tool_parser import FunctionCall, ToolParser


class Characters:
    """One id per character."""

    pad_token = "<|pad|>"

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return {"<tool_call|>": 7, "<|observation|>": -1}.get(token)


def tool(name: str, required: list[str], **types: Any) -> OpenAIFunctionToolSchema:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": required}
    return OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
    )


SEARCH = tool(
    "search", ["q"], q="string", k="integer", ratio="number", safe="boolean", tags="array", opts="object", any="null"
)
READ_FILE = tool("read_file", ["path"], path="string")


def extract(parser: str, text: str, tools: Any = None) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = asyncio.run(
        ToolParser.get_tool_parser(parser, Characters()).extract_tool_calls([ord(c) for c in text], tools)
    )
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


def test_hermes() -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"a": [1, null], "ü": "ß"}}\n</tool_call>'
    assert extract("hermes", f"hm {good} and {good}!") == ("hm  and !", [("f", {"a": [1, None], "ü": "ß"})] * 2)
    for bad in ("[1]", '"f"', "{}", '{"name": "f"}', '{"name": 3, "arguments": {}}', "{", ""):
        assert extract("hermes", f"<tool_call>{bad}</tool_call>{good}") == ("", [("f", {"a": [1, None], "ü": "ß"})])
    assert extract("hermes", "<tool_call>{") == ("<tool_call>{", [])


def test_gpt_oss() -> None:
    call = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    thought = "<|channel|>analysis<|message|>maybe " + call + "<|end|>"
    assert extract("gpt-oss", f"{thought}{call}<|pad|>") == ("", [("f", {"a": 1})])
    assert extract("gpt-oss", f"<|start|>assistant{thought}") == ("", [])
    raw = ToolParser.get_tool_parser("gpt-oss", Characters()).parse(call.replace('{"a": 1}', "{bad"))
    assert raw == ("", [FunctionCall(name="f", arguments="{bad")])


def qwen_call(**parameters: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function=search>\n{body}</function>\n</tool_call>"


def test_qwen3_coder_uses_types_from_the_schema() -> None:
    text = "so " + qwen_call(q="a\nb", k="5", ratio="3.0", safe="TRUE", tags="('x', 2)", opts='{"a": null}', new="1")
    assert extract("qwen3_coder", text, [READ_FILE, SEARCH]) == (
        "so ",
        [
            (
                "search",
                {"q": "a\nb", "k": 5, "ratio": 3, "safe": True, "tags": ["x", 2], "opts": {"a": None}, "new": "1"},
            )
        ],
    )
    assert extract("qwen3_coder", qwen_call(k="5", safe="true"))[1] == [("search", {"k": "5", "safe": "true"})]
    assert extract("qwen3_coder", qwen_call(k="5"), [READ_FILE])[1] == [("search", {"k": "5"})]


def test_qwen3_coder_unparsable_values_stay_text() -> None:
    odd = {"k": "five", "ratio": "nan", "tags": "{1, 2}", "opts": "{'a': 1}", "any": "__import__('os')", "q": "NULL"}
    (call,) = extract("qwen3_coder", qwen_call(safe="maybe", **odd), [SEARCH])[1]
    assert call[1] == odd | {"safe": False, "opts": {"a": 1}, "q": None}
    assert extract("qwen3_coder", qwen_call(ratio="1e999"), [SEARCH])[1] == [("search", {"ratio": "1e999"})]


def test_qwen3_coder_truncated_by_the_length_limit() -> None:
    assert extract("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=q>\ncats an", [SEARCH]) == (
        "",
        [("search", {"q": "cats an"})],
    )
    assert extract("qwen3_coder", "x<tool_call>\n<function=sea") == ("x", [])
    assert extract("qwen3_coder", "<tool_call>\n") == ("<tool_call>\n", [])
    assert extract("qwen3_coder", "<tool_call><function=search><parameter=q")[1] == [("search", {})]


def test_glm() -> None:
    pair = "<arg_key>k</arg_key>\n<arg_value>[1]</arg_value>\n<arg_key>q</arg_key><arg_value> cats </arg_value>"
    call = f"<tool_call>search\n{pair}</tool_call>"
    assert extract("glm", f"\n<think>t</think>ok {call}{call}") == ("ok ", [("search", {"k": [1], "q": "cats"})] * 2)
    assert extract("glm", "</think>now <tool_call>stop</tool_call>") == ("now ", [("stop", {})])
    assert extract("glm", f"{call[:-3]}") == (call[:-3], [])


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        (
            "seed",
            "<seed:tool_call><function=f>\n<parameter=a>1</parameter><parameter=b>x</parameter></function></seed:tool_call>",
        ),
        (
            "minimax",
            '<minimax:tool_call><invoke name="f">\n<parameter name="a">1</parameter><parameter name="b">x</parameter>'
            "</invoke></minimax:tool_call>",
        ),
        (
            "deepseek_v4",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
            '<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
        ),
    ],
)
def test_calls_in_nested_tags(parser: str, call: str) -> None:
    assert extract(parser, f"ok {call}") == ("ok ", [("f", {"a": 1, "b": "x"})])
    assert extract(parser, call + call)[1] == [("f", {"a": 1, "b": "x"})] * 2
    assert extract(parser, call[:-4]) == (call[:-4], [])
    assert extract(parser, "plain") == ("plain", [])


def test_deepseek_text_values_are_not_parsed_as_json() -> None:
    text = (
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="b" string="true">12</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜function_calls>"
    )
    assert extract("deepseek_v4", text) == ("", [("f", {"b": "12"})])


def kimi(call_id: str, arguments: str) -> str:
    call = f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"ok<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def test_kimi_finds_the_tool_of_an_id() -> None:
    tools = [SEARCH, READ_FILE]
    assert extract("kimi", kimi("search", '{"k": 1}'), tools) == ("ok", [("search", {"k": 1})])
    assert extract("kimi", kimi(" functions.read-file:0 ", "{}"), tools)[1] == [("read_file", {})]
    assert extract("kimi", kimi("call_1", '{"path": "a"}'), tools)[1] == [("read_file", {"path": "a"})]
    assert extract("kimi", kimi("call_1", "[1]"), tools)[1] == [("call_1", {})]
    assert extract("kimi", kimi("functions.f:0", "{}"))[1] == [("functions.f:0", {})]
    parser = ToolParser.get_tool_parser("kimi", Characters())
    assert [call.id for call in parser.parse(kimi(" functions.search:3", "{}"), tools)[1]] == ["functions.search:3"]


def test_gemma4() -> None:
    text = '<|tool_call>call:f{a:<|"|>x, {y}\nz<|"|>,b:5,c:2.5,d:True,e:null,f:some text}<tool_call|>'
    flat = {"a": "x, {y}\nz", "b": 5, "c": 2.5, "d": True, "e": None, "f": "some text"}
    assert extract("gemma4", f"ok{text}<|pad|>") == ("ok", [("f", flat)])
    nested = '<|tool_call>call:f{a:[1,<|"|>x<|"|>,{b:false}],c:{d:{},e:[]},g:7}<tool_call|>'
    assert extract("gemma4", nested)[1] == [("f", {"a": [1, "x", {"b": False}], "c": {"d": {}, "e": []}, "g": 7})]
    assert extract("gemma4", "<|tool_call>call:f{}<tool_call|>") == ("", [("f", {})])
    for bad in ("[[[", "a:[1,2", "a:", ":", "}}", "a:{b:[}"):
        extract("gemma4", f"<|tool_call>call:f{{{bad}}}<tool_call|>")


def test_stop_tokens_must_be_in_the_tokenizer() -> None:
    parsers = {name: ToolParser.get_tool_parser(name, Characters()) for name in ("hermes", "gemma4", "glm", "kimi")}
    assert {name: parser.stop_token_ids for name, parser in parsers.items()} == {
        "hermes": [],
        "gemma4": [7],
        "glm": [],
        "kimi": [],
    }
    with_unknown = SimpleNamespace(unk_token_id=3, convert_tokens_to_ids=lambda token: 3)
    assert ToolParser.get_tool_parser("glm", with_unknown).stop_token_ids == []


def test_custom_parsers() -> None:
    @ToolParser.register("shouting")
    class Shouting(ToolParser):
        async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> Any:
            return self.tokenizer.decode(responses_ids).upper(), []

    assert extract("shouting", "hey") == ("HEY", [])
    with pytest.raises(ValueError, match=r"tool parser 'hermes' is already registered"):
        ToolParser.register("hermes")(Shouting)
    with pytest.raises(ValueError, match=r"multi_turn\.format=hermse: no such tool parser. Did you mean 'hermes'\?"):
        ToolParser.get_tool_parser("hermse", Characters())


@pytest.mark.parametrize("parser", sorted(ToolParser.registry))
def test_parsers_never_fail(parser: str) -> None:
    if parser == "shouting":
        return
    marks = [
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "<parameter=",
        ">",
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        "a",
        "\n",
    ]
    marks += ["<|tool_call>call:f{", "}<tool_call|>", '<|"|>', "<arg_key>", "<seed:tool_call>", "</seed:tool_call>"]
    state = 12345
    for _ in range(300):
        text = ""
        for _ in range(12):
            state = (state * 1103515245 + 12345) % 2**31
            text += marks[(state >> 8) % len(marks)]
        content, calls = ToolParser.get_tool_parser(parser, Characters()).parse(text, [SEARCH])
        assert isinstance(content, str) and all(isinstance(call, FunctionCall) for call in calls)


@pytest.mark.parametrize("value", ["[" * 5000, "[" * 5000 + "]" * 5000, "1" * 5000], ids=["open", "deep", "digits"])
@pytest.mark.parametrize(
    "parser, text",
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": VALUE}}</tool_call>'),
        ("qwen3_coder", "<tool_call><function=search><parameter=opts>VALUE</parameter></function></tool_call>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>VALUE</arg_value></tool_call>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>VALUE<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:f{a:VALUE}<tool_call|>"),
        ("llama3_json", '{"name": "f", "parameters": {"a": VALUE}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": VALUE}}]'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>VALUE<｜tool▁call▁end｜>"),
    ],
)
def test_values_that_python_refuses_to_read(parser: str, text: str, value: str) -> None:
    _, calls = ToolParser.get_tool_parser(parser, Characters()).parse(text.replace("VALUE", value), [SEARCH])
    assert all(isinstance(call, FunctionCall) for call in calls)


@pytest.mark.parametrize(
    "name, text, content, calls",
    [
        ("llama3_json", 'I see. {"name": "f", "parameters": {"a": 1}}', "I see. ", [("f", {"a": 1})]),
        (
            "llama3_json",
            '<|python_tag|>{"name": "f", "parameters": {"a": {"b": "}"}}}; {"name": "g", "parameters": {}}',
            "",
            [("f", {"a": {"b": "}"}}), ("g", {})],
        ),
        ("llama3_json", 'No call {"a": 1} {"name": 3}', 'No call {"a": 1} {"name": 3}', []),
        (
            "mistral",
            'Hm.[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc"}, {"name": "g", "arguments": {}}]',
            "Hm.",
            [("f", {"a": 1}), ("g", {})],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", {"a": 1}), ("g", {})]),
        ("mistral", "[TOOL_CALLS] [{'name': f", "", []),
        (
            "deepseek_v3",
            "So<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": [1, 2]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "So",
            [("f", {"a": [1, 2]})],
        ),
        ("deepseek_v3", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', "", [("f", {"a": 1})]),
        (
            "openai",
            '{"content": "ok", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}',
            "ok",
            [("f", {"a": 1})],
        ),
        (
            "openai",
            'x {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}, 3]}',
            "x ",
            [("f", {"a": 1})],
        ),
        ("openai", '{"tool_calls": 3}', '{"tool_calls": 3}', []),
    ],
)
def test_further_formats(name: str, text: str, content: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    parser = ToolParser.get_tool_parser(name, None)
    found_content, found = parser.parse(text)
    assert (found_content, [(call.name, json.loads(call.arguments)) for call in found]) == (content, calls)


@pytest.mark.parametrize("name", sorted(ToolParser.registry))
def test_malformed_calls_are_counted(name: str) -> None:
    parser = ToolParser.get_tool_parser(name, type("T", (), {"pad_token": None})())
    broken = f"text {parser.opening} broken"
    assert parser.count_calls(broken) == 1 and parser.parse(broken)[1] == []
    assert parser.count_calls("plain text") == 0
