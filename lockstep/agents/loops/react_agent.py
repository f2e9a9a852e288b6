"""`react_agent`: a graph that calls a chat model holds the row's conversation, such as one of LangGraph.

row ─► graph.ainvoke({"messages": prompt}) ─► chat model, an own one ─► policy
    ◄─ what the session recorded, as trajectories

The graph is your own (`build_graph(model, tools)`), or by default: call the model, run the tools that it calls, and so on.
"""

import logging
import uuid
from collections.abc import Mapping
from typing import Any

from lockstep.agents.conversation import Conversation
from lockstep.agents.endpoint.answers import Session
from lockstep.agents.endpoint.recorder import SessionRecorder
from lockstep.agents.loops.agent_loop import AgentLoop, Setup, register
from lockstep.agents.loops.recorded import OutOfTimeError, OwnTime, answer_settings, take_branches
from lockstep.agents.loops.tool_agent import MALFORMED, check_tools_kwargs
from lockstep.agents.renderer import texts_of
from lockstep.agents.tools.calls import CallLimits, ToolSession
from lockstep.registry import load_plugin
from lockstep.utils.untrusted import message_of

logger = logging.getLogger(__name__)

MAX_STEPS = 10_000
"""Steps of a graph; limits on turns and tokens end it long before."""


@register("react_agent")
class ReactAgent(AgentLoop):
    """
    graph:     `file.py:build_graph` or `module.build_graph`: (chat model, tools) -> an object with `ainvoke`. None: call the
               run's tools until the policy calls none.
    timeout_s: of one conversation, without the time of the policy.
    """

    uses_tools = True

    def __init__(self, setup: Setup, graph: str | None = None, timeout_s: float = 600.0, **options: Any) -> None:
        super().__init__(setup, **options)
        try:
            from lockstep.agents.loops.chat_model import PolicyChatModel, as_langchain
        except ModuleNotFoundError as error:
            raise ValueError(
                f"react_agent: {error.name} is not installed: pip install 'lockstep-rl[langgraph]'"
            ) from error
        self.timeout_s = timeout_s
        self.has_graph = graph is not None
        self.name = graph or "react_agent"
        self.limits = CallLimits.of(setup.config)
        schemas = {name: tool.tool_schema.model_dump(exclude_unset=True) for name, tool in setup.tools.items()}
        build = react_graph if graph is None else load_plugin("react_agent: graph", _reference(graph))
        self.graph = build(PolicyChatModel(schemas=schemas), [as_langchain(tool) for tool in setup.tools.values()])
        if not hasattr(self.graph, "ainvoke"):
            raise ValueError(f"react_agent: graph={graph} must return an object with `ainvoke`, not {self.graph!r}")
        self._failures: set[str] = set()

    def check_row(self, row: Mapping[str, Any]) -> None:
        if row.get("interaction_kwargs"):
            raise ValueError(
                "agent_name='react_agent' has no interactions; remove interaction_kwargs, or use tool_agent"
            )
        if not self.setup.tools and not self.has_graph:
            raise ValueError(
                "agent_name='react_agent' needs tools or a graph: set actor_rollout_ref.rollout.multi_turn.tool_config_path or "
                "function_tool_path, or `graph` in an entry of actor_rollout_ref.rollout.agent.agent_loop_config_path"
            )
        check_tools_kwargs(row, self.setup.tools)

    async def run(self, conversation: Conversation) -> None:
        from lockstep.agents.loops.chat_model import Held, held

        answers = answer_settings(conversation, self.setup.rollout, force_sampling=True)
        own_time = OwnTime(conversation.complete)
        row = conversation.row
        recorder = SessionRecorder(self.setup.renderer, texts_of(row["raw_prompt"]))
        session = Session("", recorder, own_time.sample, answers)
        tools = ToolSession(self.setup.tools, row.get("tools_kwargs") or {}, self.limits, str(uuid.uuid4()), row)
        token = held.set(Held(conversation, session, tools))
        try:
            reason = await self._run_graph(conversation, own_time)
            conversation.note_rewards(await tools.close())
        finally:
            held.reset(token)
            await tools.release()
        if not session.recorder.turns and not conversation.failure:
            why = f"the first call of its chat model ended it: {reason}" if reason else "it did not call its chat model"
            self._fail(conversation, "NoTurn", f"the graph of react_agent ended without a turn of the policy: {why}")
        take_branches(conversation, session.recorder, max_prompt=self.setup.rollout.prompt_length)
        conversation.finish_reason = reason or conversation.finish_reason

    async def _run_graph(self, conversation: Conversation, own_time: OwnTime) -> Any:
        """The limit that ended the conversation; None if the graph ended by itself, or failed."""
        from lockstep.agents.loops.chat_model import LimitReachedError

        config = {"recursion_limit": MAX_STEPS, "configurable": {"row": conversation.row}}
        try:
            call = self.graph.ainvoke({"messages": _prompt_of(conversation.row)}, config=config)
            await own_time.limit(call, self.timeout_s, "program", self.name)
        except LimitReachedError as limit:
            return limit.reason
        except Exception as error:  # noqa: BLE001 - a user's graph may raise anything: it costs its own conversation
            what = f"{type(error).__name__}({message_of(error)!r})"
            if isinstance(error, OutOfTimeError):
                what = f"timeout_s={self.timeout_s:g} exceeded"
            self._fail(conversation, type(error).__name__, f"the graph of react_agent failed: {what}", error)
        return None

    def _fail(self, conversation: Conversation, kind: str, message: str, error: Exception | None = None) -> None:
        conversation.fail("program", message)
        if kind not in self._failures:  # the log must not be flooded
            self._failures.add(kind)
            logger.error("%s (further ones are only counted)", message, exc_info=error)


def _prompt_of(row: Mapping[str, Any]) -> list[Any]:
    """The row's messages, with images as LangChain takes them."""

    def shown(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": part["image"]}}

    contents = [message.get("content") for message in row["raw_prompt"]]
    return [
        {**message, "content": [*map(shown, content)]} if isinstance(content, list) else message
        for message, content in zip(row["raw_prompt"], contents)
    ]


def react_graph(model: Any, tools: list[Any]) -> Any:
    """Call the model, run the tools that it calls, and so on until it calls none."""
    from langchain_core.messages import ToolMessage
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    bound = model.bind_tools(tools)

    async def call_model(state: MessagesState) -> Any:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    async def report_malformed(state: MessagesState) -> Any:
        last: Any = state["messages"][-1]
        call = last.invalid_tool_calls[0]
        return {"messages": [ToolMessage(MALFORMED, name="error", tool_call_id=call["id"])]}

    def next_node(state: MessagesState) -> str:
        last: Any = state["messages"][-1]
        return "tools" if last.tool_calls else "malformed" if last.invalid_tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode(tools))
    graph.add_node("malformed", report_malformed)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", next_node, ["tools", "malformed", END])
    graph.add_edge("tools", "model")
    graph.add_edge("malformed", "model")
    return graph.compile()


def _reference(graph: str) -> str:
    return graph if ":" in graph else ":".join(graph.rsplit(".", 1))
