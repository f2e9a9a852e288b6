"""Turns, branches and bridges, with the forms that chat templates have."""

import pytest

from lockstep.agents.endpoint.recorder import SessionRecorder, Turn
from lockstep.agents.renderer import Message, Renderer
from lockstep.agents.trajectory import NOT_SAMPLED
from lockstep.protocol.generation import Completion
from tests.agents.endpoint.service import END, TOOL_TEMPLATE, tokenizer

START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "chatml": TOOL_TEMPLATE,
    # reasoning of earlier answers is dropped, as in Qwen3
    "reasoning": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}" + START,
    # text of a call is dropped, as in Llama 3.1
    "calls alone": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['tool_calls'] %}"
    "{{ m['tool_calls'][-1]['function'] | tojson }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    + START,
    # blank before the end, as in Llama 2
    "blank": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }} <|im_end|>\n{% endfor %}" + START,
}
USER: Message = {"role": "user", "content": "1+2?"}
MORE: Message = {"role": "user", "content": "Sure?"}


def recorder(template: str) -> SessionRecorder:
    found = tokenizer()
    found.chat_template = template
    return SessionRecorder(Renderer(found, [END]))


def add(
    record: SessionRecorder, messages: list[Message], answer: Message, ids: list[int], trainable: bool = True
) -> Turn:
    completion = Completion(ids, [-0.5] * len(ids), "stop", [3] * len(ids))
    return record.add(record.prompt_for(messages), answer, completion, trainable=trainable)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_cut", [False, True])
def test_bridges(name: str, is_cut: bool) -> None:
    record = recorder(TEMPLATES[name])
    encode = record.renderer.encode
    ids = [*encode("<think>hm</think>It is 3."), *([] if is_cut else [END])]
    answer: Message = {"role": "assistant", "content": "<think>hm</think>It is 3."}
    turn = add(record, [USER], answer, ids)
    prompt = record.prompt_for([USER, answer, MORE])
    assert prompt.parent is turn and prompt.ids[: len(turn.all_ids)] == turn.all_ids
    close = "<|im_end|>" if is_cut else ""
    space = " " if name == "blank" else ""
    expected = f"{close}\n<|im_start|>user\nSure?{space}<|im_end|>\n<|im_start|>assistant\n"
    assert record.renderer.tokenizer.decode(prompt.ids[len(turn.all_ids) :]) == expected


def test_bridge_after_a_call_whose_text_the_template_drops() -> None:
    record = recorder(TEMPLATES["calls alone"])
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    answer: Message = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    turn = add(record, [USER], answer, [*record.renderer.encode('I add. {"name": "add"}'), END])
    prompt = record.prompt_for([USER, answer, {"role": "tool", "content": "3"}])
    assert prompt.parent is turn
    text = record.renderer.tokenizer.decode(prompt.ids[len(turn.all_ids) :])
    assert text == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_template_without_ends() -> None:
    record = recorder("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: ")
    answer: Message = {"role": "assistant", "content": "3"}
    turn = add(record, [USER], answer, [*record.renderer.encode("3"), END])
    prompt = record.prompt_for([USER, answer, MORE])
    assert prompt.ids[len(turn.all_ids) :] == record.renderer.encode("\nuser: Sure?\nassistant: ")


def test_template_that_hides_answers_begins_a_branch(caplog: pytest.LogCaptureFixture) -> None:
    record = recorder("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}\n{% endfor %}")
    answer: Message = {"role": "assistant", "content": "3"}
    add(record, [USER], answer, [*record.renderer.encode("3"), END])
    assert record.prompt_for([USER, answer, MORE]).parent is None
    assert "begins a new branch" in caplog.text


def test_other_tools_begin_a_branch() -> None:
    record = recorder(TOOL_TEMPLATE)
    answer: Message = {"role": "assistant", "content": "3"}
    add(record, [USER], answer, [*record.renderer.encode("3"), END])
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert record.prompt_for([USER, answer, MORE], tools).parent is None
    assert record.prompt_for([USER, answer, MORE]).parent is not None


def test_branches_count_each_sampled_token_once() -> None:
    record = recorder(TOOL_TEMPLATE)
    encode = record.renderer.encode
    first: Message = {"role": "assistant", "content": "3"}
    one = add(record, [USER], first, [*encode("3"), END])
    two = add(record, [USER, first, MORE], {"role": "assistant", "content": "yes"}, [*encode("yes"), END])
    three = add(record, [USER, first, MORE], {"role": "assistant", "content": "no"}, [*encode("no"), END])
    asked: Message = {"role": "user", "content": "?"}
    other = add(record, [asked], {"role": "assistant", "content": "4"}, [*encode("4"), END], trainable=False)
    a, b, c = record.branches()
    assert a.prompt_ids == b.prompt_ids == one.added_ids and c.prompt_ids == other.added_ids
    bridge = len(two.added_ids)
    assert a.response_ids == one.token_ids + two.added_ids + two.token_ids
    assert a.response_mask == [1] * 2 + [0] * bridge + [1] * 4
    assert b.log_probs[:2] == [0.0, 0.0] and b.policy_versions[:2] == [NOT_SAMPLED] * 2
    assert b.response_mask == [0] * 2 + [0] * bridge + [1] * 3 and b.response_ids[-3:] == three.token_ids
    assert c.response_mask == [0, 0] and record.num_untrainable == 1
    assert a.policy_versions == [3] * 2 + [-1] * bridge + [3] * 4
    assert a.log_probs == [-0.5] * 2 + [0.0] * bridge + [-0.5] * 4
    sampled = sum(sum(branch.response_mask) for branch in (a, b, c))
    assert sampled == sum(len(turn.token_ids) for turn in record.turns if turn.trainable)
