"""Anthropic's own client against the endpoint: messages, whole and streamed, tools, errors."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.agents.endpoint.service import ADD, CALL, ScriptedPolicy, serving

TOOLS: Any = [{"name": "add", "description": "Add two numbers.", "input_schema": ADD["parameters"]}]
QUESTION: Any = [{"role": "user", "content": "1+2?"}]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Any, ScriptedPolicy]]:
    policy = ScriptedPolicy()
    with serving(policy) as endpoint:
        yield endpoint, policy


class Service:
    def __init__(self, endpoint: Any, policy: ScriptedPolicy) -> None:
        self.policy = policy
        self.client: Any = anthropic.Anthropic(
            base_url=endpoint.open_session("one").removesuffix("/v1"), api_key="none", max_retries=0
        )
        self.recorder = endpoint._sessions["one"].recorder

    @property
    def turns(self) -> Any:
        return self.recorder.turns

    def create(self, messages: Any = QUESTION, **more: Any) -> Any:
        return self.client.messages.create(**{"model": "policy", "max_tokens": 100, "messages": messages} | more)


@pytest.fixture
def service(running: tuple[Any, ScriptedPolicy]) -> Iterator[Service]:
    endpoint, policy = running
    policy.restart()
    found = Service(endpoint, policy)
    with found.client:
        yield found
    endpoint.close_session("one")


def test_messages(service: Service) -> None:
    service.policy.script = ["It is 3.", "Yes."]
    answer = service.create(system=[{"type": "text", "text": "Be short."}])
    assert answer.content[0].text == "It is 3." and answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == len(service.turns[0].token_ids)
    blocks = [block.model_dump() for block in answer.content]
    more = [*QUESTION, {"role": "assistant", "content": blocks}, {"role": "user", "content": "Sure?"}]
    assert service.create(more, system="Be short.").content[0].text == "Yes."
    assert service.turns[1].parent is service.turns[0]


def test_streamed_messages(service: Service) -> None:
    text = "The sum of one and two is three – drei. " * 2
    service.policy.script = [text]
    with service.client.messages.stream(model="policy", max_tokens=100, messages=QUESTION) as stream:
        parts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(parts) == text and len(parts) > 2
    assert (message.content[0].text, message.stop_reason) == (text, "end_turn")
    assert message.usage.output_tokens == len(service.turns[0].token_ids)
    assert message.usage.input_tokens == len(service.turns[0].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_tools(service: Service, stream: bool) -> None:
    service.policy.script = [f"I add them. {CALL}", "It is 3."]
    if stream:
        with service.client.messages.stream(model="policy", max_tokens=200, messages=QUESTION, tools=TOOLS) as events:
            answer = events.get_final_message()
    else:
        answer = service.create(tools=TOOLS)
    text, call = answer.content
    assert (text.text, answer.stop_reason) == ("I add them. ", "tool_use")
    assert (call.name, call.input) == ("add", {"a": 1, "b": 2})
    said = {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
    asked = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
    assert service.create([*QUESTION, said, asked], tools=TOOLS).content[0].text == "It is 3."
    assert service.turns[1].parent is service.turns[0]
    assert service.policy.text(service.turns[1].added_ids) == (
        "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_stop_sequence_and_length(service: Service) -> None:
    service.policy.script = ["one two three", "one two three"]
    answer = service.create(stop_sequences=["two"])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "two", "one ")
    assert service.create(max_tokens=3).stop_reason == "max_tokens"


def test_count_tokens_and_models(service: Service) -> None:
    count = service.client.messages.count_tokens(model="policy", messages=QUESTION).input_tokens
    service.policy.script = ["3"]
    service.create()
    assert count == len(service.turns[0].prompt_ids)
    assert [model.id for model in service.client.models.list()] == ["policy"]


def test_errors_have_the_protocol_s_form(service: Service) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        service.create(model="other")
    assert caught.value.body["error"] == {
        "type": "not_found_error",
        "message": "the model 'other' does not exist; this server has policy",
    }
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: Field required"):
        service.client.post("/v1/messages", body={"model": "policy", "messages": QUESTION}, cast_to=object)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        service.create([{"role": "user", "content": "x" * 3000}])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="only parts of text are supported: this model reads no images"):
        service.create([{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="cannot be enforced"):
        service.create(tools=TOOLS, tool_choice={"type": "any"})
    assert service.policy.requests == []


def test_an_error_in_the_middle_of_a_stream(service: Service) -> None:
    service.policy.script = []  # the policy fails
    with (
        pytest.raises(anthropic.APIStatusError, match="the server failed: IndexError"),
        service.client.messages.stream(model="policy", max_tokens=9, messages=QUESTION) as stream,
    ):
        stream.get_final_message()
