"""OpenAI's own client against the endpoint: chat, completions, responses; whole and streamed."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lockstep.agents.tool_parser import FunctionCall, ToolParser
from tests.agents.endpoint.service import ADD, CALL, END, ScriptedPolicy, serving

TOOLS: Any = [{"type": "function", "function": ADD}]
QUESTION: Any = [{"role": "user", "content": "1+2?"}]


class Service:
    """One session of the endpoint, with OpenAI's client."""

    def __init__(self, endpoint: Any, policy: ScriptedPolicy) -> None:
        self.endpoint, self.policy = endpoint, policy
        self.client = openai.OpenAI(base_url=endpoint.open_session("one"), api_key="none", max_retries=0)
        self.recorder = endpoint._sessions["one"].recorder

    @property
    def turns(self) -> Any:
        return self.recorder.turns


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Any, ScriptedPolicy]]:
    policy = ScriptedPolicy()
    with serving(policy) as endpoint:
        yield endpoint, policy


@pytest.fixture
def service(running: tuple[Any, ScriptedPolicy]) -> Iterator[Service]:
    endpoint, policy = running
    policy.restart()
    found = Service(endpoint, policy)
    with found.client:
        yield found
    endpoint._sessions.pop("one", None)


def chat(service: Service, messages: Any = QUESTION, **more: Any) -> Any:
    return service.client.chat.completions.create(model="policy", messages=messages, **more)


def test_chat(service: Service) -> None:
    service.policy.script = ["It is 3."]
    answer = chat(service, logprobs=True, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, answer.object) == ("It is 3.", "stop", "chat.completion")
    (request,), (turn,) = service.policy.requests, service.turns
    assert service.policy.text(request.prompt_ids) == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    assert request.sampling.temperature == 0.8 and turn.trainable
    assert turn.prompt_ids == request.prompt_ids == answer.prompt_token_ids
    assert turn.token_ids == [*service.policy.ids("It is 3."), END] == choice.token_ids
    assert [entry.logprob for entry in choice.logprobs.content] == turn.completion.log_probs
    assert answer.usage.prompt_tokens == len(turn.prompt_ids) and answer.usage.completion_tokens == len(turn.token_ids)


def test_streamed_chat_is_generated_in_pieces(service: Service) -> None:
    text = "The sum of one and two is three – drei – 三. " * 7
    service.policy.script = [text]
    chunks = list(chat(service, stream=True, stream_options={"include_usage": True}, logprobs=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 3
    (turn,) = service.turns
    assert turn.token_ids == [*service.policy.ids(text), END]
    assert [r.sampling.max_tokens for r in service.policy.requests][:4] == [16, 32, 64, 128]
    assert (
        turn.completion.policy_versions == sorted(turn.completion.policy_versions)
        and len(set(turn.completion.policy_versions)) > 3
    )
    log_probs = [
        e.logprob for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content
    ]
    assert log_probs == turn.completion.log_probs
    assert chunks[-1].usage.completion_tokens == len(turn.token_ids)


def test_next_turn_has_the_sampled_tokens(service: Service) -> None:
    # two tokens for what the tokenizer would write differently: an end in the middle of the text
    service.policy.script = [[*service.policy.ids("It is"), 0, *service.policy.ids(" 3."), END], "Sure."]
    first = chat(service).choices[0].message
    chat(service, [*QUESTION, first, {"role": "user", "content": "Sure?"}])
    one, two = service.turns
    assert two.parent is one and 0 in one.token_ids
    assert two.prompt_ids == one.prompt_ids + one.token_ids + service.policy.ids(
        "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    (branch,) = service.endpoint.close_session("one").branches()
    assert branch.prompt_ids + branch.response_ids == two.all_ids
    sampled = [t for t, m in zip(branch.response_ids, branch.response_mask) if m]
    assert sampled == one.token_ids + two.token_ids
    with pytest.raises(openai.NotFoundError, match="no session"):
        chat(service)


def test_rewritten_history_begins_a_branch(service: Service) -> None:
    service.policy.script = ["It is 3.", "Really.", "Yes."]
    chat(service)
    told = {"role": "assistant", "content": "It is 4."}
    chat(service, [*QUESTION, told, {"role": "user", "content": "Sure?"}])
    assert service.turns[1].parent is None and "It is 4." in service.policy.text(service.turns[1].prompt_ids)
    trimmed = {"role": "assistant", "content": " It is 3.\n"}  # what clients do to answers
    chat(service, [*QUESTION, trimmed, {"role": "user", "content": "Sure?"}])
    assert service.turns[2].parent is service.turns[0]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(service: Service, stream: bool) -> None:
    service.policy.script = [f"I add them. {CALL}", "It is 3."]
    answer = chat(service, tools=TOOLS, stream=stream)
    if stream:
        deltas = [chunk.choices[0] for chunk in answer]
        content = "".join(choice.delta.content or "" for choice in deltas)
        (call,) = [call for choice in deltas for call in choice.delta.tool_calls or ()]
        finish = deltas[-1].finish_reason
    else:
        content, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        (call,) = answer.choices[0].message.tool_calls
    assert (content, finish) == ("I add them. ", "tool_calls")
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
    assert re.fullmatch("[0-9a-f]{9}", call.id)  # as templates of Mistral require
    said = {"role": "assistant", "content": content, "tool_calls": [call.model_dump(exclude={"index"})]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    assert chat(service, [*QUESTION, said, result], tools=TOOLS).choices[0].message.content == "It is 3."
    one, two = service.turns
    assert two.parent is one and '"name": "add"' in service.policy.text(one.prompt_ids)
    bridge = "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert two.added_ids == service.policy.ids(bridge)


class EndedCalls(ToolParser):
    """Calls whose last token ends the answer, as in gpt-oss."""

    def parse(self, text: str, tools: Any = None) -> Any:
        calls = re.findall(r"<call>(\w+)<\|im_end\|>", text)
        return re.sub(r"<call>\w+<\|im_end\|>", "", text), [FunctionCall(name=name, arguments="1") for name in calls]


def test_calls_that_the_last_token_ends(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToolParser, "get_tool_parser", lambda name, tokenizer: EndedCalls(tokenizer))
    service.policy.script = ["I add. <call>add", "no call"]
    message = chat(service, tools=TOOLS).choices[0].message
    assert message.content == "I add. " and message.tool_calls[0].function.name == "add"
    assert message.tool_calls[0].function.arguments == '{"arguments": 1}'  # no object
    assert chat(service, tools=TOOLS).choices[0].message.content == "no call"


def test_tool_choice_none_hides_the_tools(service: Service) -> None:
    service.policy.script = [CALL]
    message = chat(service, tools=TOOLS, tool_choice="none").choices[0].message
    assert message.tool_calls is None and message.content == CALL
    assert "add" not in service.policy.text(service.turns[0].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(service: Service, stream: bool) -> None:
    service.policy.script = ["I look. Observation: none of this was asked for by anybody."]
    answer = chat(service, stop=["Observation:"], stream=stream)
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    (turn,) = service.turns
    assert text == "I look. " and service.policy.text(turn.token_ids) == "I look. Observation:"
    assert turn.completion.stop_reason == "stop" and len(turn.completion.log_probs) == len(turn.token_ids) == len(
        turn.completion.policy_versions
    )
    # each token has the experts of the call that sampled it, or if it was the last token of that call, of the next
    routes = turn.completion.routes.ravel().tolist()
    assert len(turn.added_ids) < len(routes) <= len(turn.added_ids) + len(turn.token_ids)
    versions = turn.completion.policy_versions
    assert all(r - v in (0, 1) for r, v in zip(routes[len(turn.added_ids) :], versions))


def test_length_and_the_bridge_of_a_cut_answer(service: Service) -> None:
    service.policy.script = ["It is three.", "3"]
    answer = chat(service, max_completion_tokens=5).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("It is", "length")
    chat(service, [*QUESTION, answer.message, {"role": "user", "content": "?"}])
    assert service.policy.text(service.turns[1].added_ids).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("stream", [False, True])
def test_n_samples(service: Service, stream: bool) -> None:
    service.policy.script = ["one", "two", "three"]
    answer = chat(service, n=3, stream=stream)
    if stream:
        texts = ["", "", ""]
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
        assert answer.usage.prompt_tokens == len(service.turns[0].prompt_ids)
    assert sorted(texts) == ["one", "three", "two"]
    assert len({r.seed for r in service.policy.requests}) == 3
    assert len(service.recorder.branches()) == 3


def test_other_sampling_is_not_trainable(service: Service) -> None:
    service.policy.script = ["a", "b", "c"]
    chat(service, temperature=0.8, seed=3)
    chat(service, temperature=0.2)
    chat(service, top_p=0.5)
    assert [turn.trainable for turn in service.turns] == [True, False, False]
    assert [(r.sampling.temperature, r.sampling.top_p) for r in service.policy.requests] == [
        (0.8, 1),
        (0.2, 1),
        (0.8, 0.5),
    ]
    assert service.recorder.num_untrainable == 2
    assert [sum(b.response_mask) for b in service.recorder.branches()] == [2, 0, 0]


def test_forced_sampling_ignores_the_request() -> None:
    policy = ScriptedPolicy(["a", "b"])
    with serving(policy, force_sampling=True) as endpoint:
        for name in ("one", "two"):
            with openai.OpenAI(base_url=endpoint.open_session(name), api_key="none") as client:
                client.chat.completions.create(model="policy", messages=QUESTION, temperature=0, seed=1)
            assert endpoint.close_session(name).num_untrainable == 0
    assert [r.sampling.temperature for r in policy.requests] == [0.8, 0.8]
    assert policy.requests[0].seed != policy.requests[1].seed  # samples of a group must differ


def test_completions(service: Service) -> None:
    service.policy.script = [" 3", " 4", " 5"]
    create: Any = service.client.completions.create
    answer = create(model="policy", prompt="1+2=", logprobs=1)
    assert answer.choices[0].text == " 3"
    assert answer.choices[0].logprobs.token_logprobs == service.turns[0].completion.log_probs
    assert answer.choices[0].logprobs.text_offset[:2] == [0, 1]
    create(model="policy", prompt="1+2= 3\n2+2=")
    assert service.turns[1].parent is service.turns[0]
    assert service.turns[1].prompt_ids[len(service.turns[0].prompt_ids) :][:3] == service.turns[0].token_ids
    ids = service.turns[1].all_ids + service.policy.ids("x")
    create(model="policy", prompt=ids)
    assert service.turns[2].parent is service.turns[1] and service.turns[2].prompt_ids == ids


def test_completions_of_several_prompts(service: Service) -> None:
    service.policy.script = ["a", "b", "c", "d"]
    answer = service.client.completions.create(model="policy", prompt=["x", "yy"], n=2)
    assert len(answer.choices) == 4 and answer.usage is not None and answer.usage.prompt_tokens == 3
    prompts = [service.policy.text(turn.prompt_ids) for turn in service.turns]
    assert sorted(prompts) == ["x", "x", "yy", "yy"]


def test_streamed_completions(service: Service) -> None:
    service.policy.script = ["one two three four five six"]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(service.client.completions.create(model="policy", prompt="count: ", **options))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "one two three four five six"
    assert chunks[-1].usage.completion_tokens == len(service.turns[0].token_ids)


def test_responses(service: Service) -> None:
    service.policy.script = ["It is 3.", "Yes."]
    create = service.client.responses.create
    first = create(model="policy", input="1+2?", instructions="Be short.")
    assert (first.output_text, first.status) == ("It is 3.", "completed")
    assert service.policy.text(service.turns[0].prompt_ids).startswith("<|im_start|>system\nBe short.<|im_end|>")
    second = create(model="policy", input="Sure?", previous_response_id=first.id, instructions="Be short.")
    assert second.output_text == "Yes." and service.turns[1].parent is service.turns[0]
    with pytest.raises(openai.BadRequestError, match="no response 'resp_x'"):
        create(model="policy", input="Sure?", previous_response_id="resp_x")


@pytest.mark.parametrize("stream", [False, True])
def test_responses_with_tools(service: Service, stream: bool) -> None:
    service.policy.script = [f"I add. {CALL}", "It is 3."]
    create: Any = service.client.responses.create
    tools = [{"type": "function", **ADD}]
    kwargs = {"model": "policy", "tools": tools}
    if stream:
        events = list(create(input="1+2?", stream=True, **kwargs))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "I add. "
        assert [e.arguments for e in events if e.type == "response.function_call_arguments.done"] == [
            '{"a": 1, "b": 2}'
        ]
        response = events[-1].response
        assert events[-1].type == "response.completed"
    else:
        response = create(input="1+2?", **kwargs)
    text, call = response.output
    assert text.content[0].text == "I add. " and (call.type, call.name) == ("function_call", "add")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    items = [{"role": "user", "content": "1+2?"}, *(item.model_dump() for item in response.output), result]
    assert create(input=items, **kwargs).output_text == "It is 3."
    assert service.turns[1].parent is service.turns[0]


def test_streamed_response_that_is_cut(service: Service) -> None:
    service.policy.script = ["one two three four five"]
    with service.client.responses.stream(model="policy", input="count", max_output_tokens=20) as stream:
        events: list[Any] = list(stream)
    kinds, response = [event.type for event in events], events[-1].response
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    assert response.output_text == "one two three four f" and response.incomplete_details.reason == "max_output_tokens"


def test_models(service: Service) -> None:
    assert [model.id for model in service.client.models.list()] == ["policy"]
    assert service.client.models.retrieve("policy").owned_by == "lockstep"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs=3 is not supported; set 0, or leave it out"),
        ({"tool_choice": "required", "tools": TOOLS}, "cannot be enforced"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stop": ["a", ""]}, "must not be empty"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]}, "'image_url'"),
    ],
)
def test_wrong_requests(service: Service, more: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        chat(service, **{"messages": QUESTION} | more)
    assert caught.value.type == "invalid_request_error" and service.policy.requests == []
