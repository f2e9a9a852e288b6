"""The policy as a chat model of LangChain, and the run's tools as its tools. Needs the extra `langgraph`.

    graph ─► PolicyChatModel.ainvoke(messages) ─► Held.answer ─► session ─► policy
                                                               recorder ◄┘  turns, token by token

One model object serves all conversations: `held` is the one of the current task.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool as LangChainTool, StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from lockstep.agents.conversation import Conversation, FinishReason
from lockstep.agents.endpoint.answers import Answer, AnswerRequest, Session
from lockstep.agents.endpoint.errors import ApiError
from lockstep.agents.loops.tool_agent import call_id_of
from lockstep.agents.renderer import Message, Renderer
from lockstep.agents.tool_parser import FunctionCall, ToolParser
from lockstep.agents.tools.calls import ToolSession
from lockstep.agents.tools.tool import BaseTool

LIMITS: dict[str | None, FinishReason] = {"context_length_exceeded": "length", "turn_limit_reached": "turns"}
"""Code of an error to the limit that it is about."""


class LimitReachedError(Exception):
    """The policy writes no further turn."""

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(f"the conversation ends: {reason}")
        self.reason: FinishReason = reason


@dataclass
class Held:
    """A conversation that a graph holds."""

    conversation: Conversation
    session: Session
    tools: ToolSession

    async def answer(self, messages: Sequence[Message], request: AnswerRequest) -> Answer:
        """The policy's turn; LimitReachedError if there is no room for one, or there were enough."""
        try:
            (stream,) = self.session.start([self.session.prompt_for(messages, request.tools)], request)
        except ApiError as error:
            if error.code in LIMITS:
                raise LimitReachedError(LIMITS[error.code]) from error
            raise
        async for item in stream:
            answer = item
        assert isinstance(answer, Answer)
        return answer

    def num_malformed(self, answer: Answer) -> int:
        """Calls that could not be parsed."""
        tokenizer = self.session.recorder.renderer.tokenizer
        parser = ToolParser.get_tool_parser(self.session.settings.tool_format, tokenizer)
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=False)
        number = max(0, parser.count_calls(text) - len(answer.tool_calls))
        self.conversation.counts.malformed_calls += number
        return number


held: ContextVar[Held] = ContextVar("held")


class PolicyChatModel(BaseChatModel):
    """schemas: of the run's tools by name, as the prompts of the rows were rendered with them.

    Sampling is that of the rollout, whatever options are bound; `max_tokens` and `stop` are respected. A cache of LangChain is not
    used: every answer is sampled.
    """

    schemas: dict[str, dict[str, Any]] = Field(default_factory=dict)
    cache: BaseCache | bool | None = Field(default=False, exclude=True)

    @property
    def _llm_type(self) -> str:
        return "lockstep"

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: str | None = None, **kwargs: Any) -> Runnable[Any, Any]:
        """tools: LangChain tools, functions, or schemas. ValueError for a tool_choice that forces a call."""
        if tool_choice not in (None, "auto"):
            raise ValueError("tool_choice cannot be enforced on the policy; use auto")
        named = [self.schemas.get(getattr(tool, "name", "")) or convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=named, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        raise NotImplementedError("the policy answers in an event loop: call `ainvoke`, in an async node of the graph")

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        own = held.get()
        request = AnswerRequest(
            tools=tuple(kwargs.get("tools") or ()), stop=tuple(stop or ()), max_tokens=kwargs.get("max_tokens")
        )
        answer = await own.answer(as_messages(messages, own.session.recorder.renderer), request)
        known = {tool["function"]["name"] for tool in request.tools}
        own.conversation.counts.malformed_calls += sum(c["function"]["name"] not in known for c in answer.tool_calls)
        num_malformed = own.num_malformed(answer) if request.tools and answer.finish != "length" else 0
        message = AIMessage(
            content=answer.text,
            tool_calls=[
                {"name": c["function"]["name"], "args": c["function"]["arguments"], "id": c["id"], "type": "tool_call"}
                for c in answer.tool_calls
            ],
            invalid_tool_calls=[
                {"name": None, "args": None, "id": str(uuid.uuid4()), "error": "malformed", "type": "invalid_tool_call"}
                for _ in range(num_malformed)
            ],
            usage_metadata={
                "input_tokens": len(answer.prompt_ids),
                "output_tokens": len(answer.token_ids),
                "total_tokens": len(answer.prompt_ids) + len(answer.token_ids),
            },
            response_metadata={"finish_reason": answer.finish},
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


def as_messages(messages: Sequence[BaseMessage], renderer: Renderer) -> list[Message]:
    """Messages as the renderer takes them."""
    found: list[Message] = []
    call_ids: dict[str, str] = {}
    converted = convert_to_openai_messages(list(messages), text_format="string")
    for is_result, group in groupby(converted, key=lambda message: message["role"] == "tool"):
        results = []
        for message in group:
            content = message.get("content") or ""
            if is_result:
                results.append(
                    (message.get("name") or "", call_ids.get(message["tool_call_id"], call_id_of(0)), content)
                )
                continue
            plain: Message = {"role": message["role"], "content": content}
            if message.get("tool_calls"):
                call_ids = {call["id"]: call_id_of(place) for place, call in enumerate(message["tool_calls"])}
                plain["tool_calls"] = [_call(call["function"], call_ids[call["id"]]) for call in message["tool_calls"]]
            found.append(plain)
        found += renderer.tool_messages(results) if results else []
    return found


def _call(function: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    named = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    return {"id": call_id, "type": "function", "function": named}


def as_langchain(tool: BaseTool) -> LangChainTool:
    """A tool of the run: calls have its deadline and limits, and are counted in their conversation."""
    function = tool.tool_schema.function

    async def call(**arguments: Any) -> str:
        own = held.get()
        result = await own.tools.call(FunctionCall(arguments=json.dumps(arguments), name=tool.name))
        own.conversation.note_call(result)
        return result.text

    return StructuredTool.from_function(
        coroutine=call,
        name=tool.name,
        description=function.description,
        args_schema=function.parameters.model_dump(exclude_none=True),
    )
