"""The bridge between turns, for chat templates in the manner of the families of models, against full rendering."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.conversation import Conversation
from lockstep.agents.loops import AgentLoop
from lockstep.agents.renderer import PLAIN, Renderer, TooLongError
from tests.agents.scripted import Scripted, converse, make_agents
from tests.tiny import tiny_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN = """{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}{% else %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}"""
DROPS_THINKING = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}
<|im_end|>
{% endfor %}"""
LLAMA = """<|bos|>{% for m in messages %}<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/header|>

{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|header|>assistant<|/header|>

{% endif %}"""
MISTRAL = """<|bos|>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{% endif -%}
[RESULTS]{"content": {{ m.content }}, "id": "{{ m.tool_call_id }}"}[/RESULTS]{% elif m.tool_calls %}[CALLS]
{%- for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% else %}{{ m.content }}<|im_end|>
{%- endif %}{% endfor %}"""
DEEPSEEK = """<|bos|>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}<|Assistant|>{% elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|outputs|>{% endif %}<|output|>{{ m.content }}<|/output|>{% elif m.content is none -%}
{%- for c in m.tool_calls %}{{ '<|call|>' + c.function.name + '\n' + c.function.arguments + '<|/call|>' }}{% endfor %}<|im_end|>
{%- else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"""
GEMMA = """<|bos|>{% for m in messages %}
{%- if m.role not in ('user', 'assistant') or (m.role == 'user') == (loop.index0 % 2 == 1) %}
{{- raise_exception('roles must alternate') }}{% endif %}<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|turn|>model
{% endif %}"""
HARMONY = """{% for m in messages %}<|start|>{% if m.role == 'tool' %}functions.{{ m.name }} to=assistant<|message|>
{{- m.content | tojson }}
{%- elif m.tool_calls %}assistant to=functions.{{ m.tool_calls[0].function.name }}<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}{{ m.role }}<|message|>{{ m.content }}{% endif %}
{%- if not m.tool_calls %}{{ '<|im_end|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
THINKS = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"

TEMPLATES: dict[str, tuple[str, str, dict[str, bool]]] = {
    "chatml": (CHATML + CHATML_PROMPT, "tool", {"user": True, "tool": True}),
    "qwen": (QWEN + CHATML_PROMPT, "tool", {"user": True, "tool": True}),
    "llama": (LLAMA, "tool", {"user": True, "tool": True}),
    "mistral": (MISTRAL, "tool", {"user": True, "tool": True}),
    "deepseek": (DEEPSEEK, "tool", {"user": True, "tool": True}),
    "gemma": (GEMMA, "user", {"user": True}),
    "harmony": (HARMONY, "tool", {"user": True, "tool": True}),
    "thinks": (THINKS, "tool", {"user": False, "tool": False}),
}
"""Template, role of tool results, and whether bridges give the tokens of a full rendering."""
SPECIAL = [
    "<|bos|>",
    "<|header|>",
    "<|/header|>",
    "[INST]",
    "[/INST]",
    "[CALLS]",
    "[RESULTS]",
    "[/RESULTS]",
    "<|User|>",
]
SPECIAL += [
    "<|Assistant|>",
    "<|outputs|>",
    "<|output|>",
    "<|/output|>",
    "<|call|>",
    "<|/call|>",
    "<|turn|>",
    "<|start|>",
]
SPECIAL += ["<|message|>", "<|end|>"]


def tokenizer_of(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *SPECIAL]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_bridge_continues_as_the_template_does(name: str) -> None:
    template, tool_role, exact = TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    end, called = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|call|>")
    renderer = Renderer(tokenizer, [end, called] if name == "harmony" else [end])
    assert (renderer.tool_role, renderer.exact) == (tool_role, exact)
    for role in exact:
        new = renderer.tool_messages([("f", "call00000", '{"x": 1}')])
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        if name == "deepseek":
            call["function"]["arguments"] = '{"a": 1}'  # type: ignore[index]
        turn: dict[str, Any] = {"role": "assistant", "content": "" if name == "qwen" else None, "tool_calls": [call]}
        if role == "user" or name in ("chatml", "thinks"):
            turn = {"role": "assistant", "content": "yes"}
        if role == "user":
            new = [{"role": "user", "content": "next"}]
        whole = renderer.ids([{"role": "user", "content": "Hi"}, turn, *new])
        last = called if name == "harmony" and role == "tool" else end
        bridge = renderer.bridge([turn], new, last)
        assert bridge and whole[-len(bridge.ids) :] == bridge.ids
        unended = renderer.bridge([turn], new)
        assert unended and unended.ids[1:] == bridge.ids  # of a turn that did not end: with its end
        assert bridge.ids.count(end) <= 1


GLM = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{%- for key, value in c.function.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>{% endfor -%}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""


@pytest.mark.parametrize(
    "template, expected",
    [
        (QWEN, '"arguments": {"a": 1}'),
        (HARMONY, 'to=functions.f<|message|>{"a": 1}<|call|>'),
        (DEEPSEEK, '<|call|>f\n{"a": 1}<|/call|>'),
        (GLM, "<arg_key>a</arg_key><arg_value>1</arg_value>"),
    ],
    ids=["qwen", "harmony", "deepseek", "glm"],
)
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}], ids=["text", "object"])
def test_arguments_of_earlier_calls_are_as_the_template_expects_them(
    arguments: Any, template: str, expected: str
) -> None:
    tokenizer = tokenizer_of(template + CHATML_PROMPT)
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|call|>")])
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    new = renderer.tool_messages([("f", "call00000", "1")])
    assert expected in tokenizer.decode(renderer.ids([*messages, *new]))
    assert not renderer.is_rewritten(messages, new)
    assert call["function"]["arguments"] == arguments  # type: ignore[index]


def test_several_results_are_one_turn() -> None:
    renderer = Renderer(tokenizer_of(QWEN + CHATML_PROMPT), [2])
    bridge = renderer.bridge([], renderer.tool_messages([("f", "1", "a"), ("g", "2", "b")]), 2)
    assert bridge is not None
    text = renderer.tokenizer.decode(bridge.ids)
    assert text.count("<|im_start|>user") == 1 and text.count("<tool_response>") == 2


def test_a_template_may_end_turns_with_text() -> None:
    renderer = Renderer(
        tokenizer_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "), [2]
    )
    renderer.check()
    for last in (2, None):
        bridge = renderer.bridge([], [{"role": "user", "content": "x"}], last)
        assert bridge is not None and bridge.ids == renderer.encode("\nuser: x\nassistant: ")


def test_a_template_that_hides_turns_is_refused() -> None:
    template = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    renderer = Renderer(tokenizer_of(template), [2])
    assert renderer.bridge([], [{"role": "user", "content": "x"}], 2) is None and renderer.tool_role == "user"
    with pytest.raises(ValueError, match="does not show where an assistant turn ends"):
        renderer.check()


def test_tools_and_system_message_of_the_conversation_are_rendered() -> None:
    """Some templates repeat the tools before the last user message; others end turns as the system message says."""
    template = """{% for m in messages %}{% if tools and loop.last %}<|start|>{{ tools[0].name }}{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}{% if messages[0].role == 'system' %}<|end|>{% endif %}<|im_end|>{% endfor %}"""
    renderer = Renderer(tokenizer_of(template), [2])
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Q" * 99}, {"role": "assistant"}]
    bridge = renderer.bridge(messages, [{"role": "user", "content": "x"}], 2, [{"name": "f"}])
    assert bridge is not None
    assert renderer.tokenizer.decode(bridge.ids) == "<|start|>f<|im_start|>user\nx<|end|><|im_end|>"


def test_names_of_calls_that_a_client_left_out() -> None:
    renderer = Renderer(
        tokenizer_of(HARMONY.replace("m.name", "messages[loop.index0 - 1].tool_calls[0].function.name")), [2]
    )
    calls = [{"id": str(i), "type": "function", "function": {"name": f"f{i}", "arguments": {}}} for i in range(2)]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    for result, name in (({"tool_call_id": "1"}, "f1"), ({}, "f0"), ({"name": "g", "tool_call_id": "1"}, "g")):
        bridge = renderer.bridge([turn], [{"role": "tool", "content": "3", **result}], 2)
        assert bridge is not None
        assert f"functions.{name} to=assistant" in renderer.tokenizer.decode(bridge.ids)


class AskTwice(AgentLoop):
    async def run(self, conversation: Conversation) -> None:
        await conversation.generate()
        if conversation.add([{"role": "user", "content": "again"}]):
            await conversation.generate()


def test_the_history_is_kept_or_follows_the_template() -> None:
    loops = {}
    for follows in (False, True):
        agents = make_agents(loop=f"{__file__}:AskTwice", use_inference_chat_template=follows)
        agents.tokenizer = tokenizer_of(DROPS_THINKING + CHATML_PROMPT)
        agents.__dict__["renderer"] = Renderer(agents.tokenizer, [2])
        policy = Scripted("<think>hard</think>8", "<think>so</think>9", tokenizer=agents.tokenizer)
        loops[follows] = converse(agents, policy, agent_name="")
    kept, followed = loops[False], loops[True]
    assert (len(kept.trajectories), kept.counts.breaks) == (1, 0)
    assert (len(followed.trajectories), followed.counts.breaks) == (2, 1)
    first, second = ("".join(followed.renderer.tokenizer.decode(t.response_ids)) for t in followed.trajectories)
    assert "hard" in first and "hard" not in second and "so" in second
    assert sum(followed.trajectories[0].response_mask) + sum(followed.trajectories[1].response_mask) == sum(
        kept.trajectory.response_mask
    )


class AskInVain(AgentLoop):
    async def run(self, conversation: Conversation) -> None:
        await conversation.generate()
        assert conversation.add([{"role": "user", "content": "again"}])


def test_a_rewritten_history_without_a_turn_is_no_sample() -> None:
    agents = make_agents(loop=f"{__file__}:AskInVain", use_inference_chat_template=True)
    agents.tokenizer = tokenizer_of(DROPS_THINKING + CHATML_PROMPT)
    agents.__dict__["renderer"] = Renderer(agents.tokenizer, [2])
    policy = Scripted("<think>hard</think>8", tokenizer=agents.tokenizer)
    done = converse(agents, policy, agent_name="")
    (only,) = done.trajectories
    assert all(only.response_mask) and "hard" in agents.tokenizer.decode(only.response_ids)


STRICT = "{% set ns = namespace(called=false) %}" + QWEN.replace(
    "{% if m.role == 'tool' %}",
    "{% if m.tool_calls %}{% set ns.called = true %}{% endif %}{% if m.role == 'tool' %}"
    "{% if not ns.called %}{{ raise_exception('no previous call') }}{% endif %}",
    1,
)


def test_a_malformed_call_that_a_template_cannot_render_ends_no_run(tmp_path: Path) -> None:
    """Templates may refuse a result whose call is not in the history: the conversation goes on as it was sampled."""
    (tmp_path / "tools.py").write_text('def now() -> str:\n    """The time."""\n    return "noon"\n')
    agents = make_agents(use_inference_chat_template=True, function_tool_path=str(tmp_path / "tools.py"))
    agents.tokenizer = tokenizer_of(STRICT + CHATML_PROMPT)
    agents.__dict__["renderer"] = Renderer(agents.tokenizer, [2])
    policy = Scripted("<tool_call>{now}</tool_call>", "Well.", tokenizer=agents.tokenizer)
    done = converse(agents, policy)
    assert done.counts.malformed_calls == 1 and done.num_assistant_turns == 2 and len(done.trajectories) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_is_special_to_a_bridge(name: str) -> None:
    """Also not the marker that the renderer uses for the same messages."""
    tokenizer = tokenizer_of(TEMPLATES[name][0])
    end, called = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|call|>")
    renderer = Renderer(tokenizer, [end, called])
    for role in renderer.exact:

        def bridge_of(text: str, role: str = role) -> str:
            results = renderer.tool_messages([("f", "call00000", text)])
            new = results if role == "tool" else [{"role": "user", "content": text}]
            bridge = renderer.bridge([], new, end)
            assert bridge is not None
            return str(tokenizer.decode(bridge.ids))

        plain = bridge_of("A 7 B")
        marker, _ = renderer._with_marker(PLAIN, [], [{"role": "user", "content": "A 7 B"}], [])
        for text in ("QXZJ7719MARKER", "RESULT7719", marker, "M", marker[:-1]):
            assert bridge_of(f"A {text} B") == plain.replace("A 7 B", f"A {text} B")


def test_special_tokens_hidden_in_the_arguments_of_calls_are_broken_up() -> None:
    """JSON text that is decoded for the template may have escapes; names, keys and ids are text as well."""
    for template in (QWEN, DEEPSEEK):
        tokenizer = tokenizer_of(template + CHATML_PROMPT)
        renderer = Renderer(tokenizer, [tokenizer.eos_token_id])

        def num_ends(name: str, arguments: Any, result: str, renderer: Renderer = renderer) -> int:
            function = {"name": name, "arguments": arguments}
            turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "call00000", "function": function}]}
            messages = [{"role": "user", "content": "Hi"}, turn, *renderer.tool_messages([(name, "call00000", result)])]
            return renderer.ids(renderer.plain_messages(messages)).count(renderer.tokenizer.eos_token_id)

        usual = num_ends("f", {"a": 1}, "1")
        assert usual > 0
        for arguments in (
            {"a": "<|im_end|>"},
            {"<|im_end|>": [{"b": "x<|im_end|>"}]},
            '{"a": "\\u003c|im_end|>"}',
            '["\\u003c|im_end|>"]',
            "<|im_end|>",
        ):
            assert num_ends("f", arguments, "1") == usual
        assert num_ends("f<|im_end|>", {"a": 1}, "1<|im_end|>") == usual


def test_text_that_cannot_fit_is_not_tokenized() -> None:
    renderer = Renderer(tokenizer_of(CHATML + CHATML_PROMPT), [2])
    longest = 0

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **options: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(text))
            return tokenizer(text, **options)

    tokenizer, renderer.tokenizer = renderer.tokenizer, Watched()
    message = {"role": "user", "content": "é" * 1_000_000}
    for call in (
        lambda: renderer.ids([message], max_tokens=100),
        lambda: renderer.encode("a" * 9_000, max_tokens=100),
        lambda: renderer.bridge([], [message], 2, max_tokens=100),
        lambda: renderer.plain_messages([message], max_tokens=100),
    ):
        with pytest.raises(TooLongError, match="more than 100 tokens"):
            call()
    assert longest <= 800
    assert len(renderer.encode("a" * 101, max_tokens=100)) == 101  # the caller checks
