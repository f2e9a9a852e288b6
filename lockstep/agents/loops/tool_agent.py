"""`tool_agent`: the policy calls tools, and talks with the row's interaction when it calls none.

PENDING ─► GENERATING ─► PROCESSING_TOOLS ─► GENERATING   the turn has tool calls
                     ├─► INTERACTING ─────► GENERATING   it has none, and the row has an interaction
                     └─► TERMINATED                      neither; or a limit is reached
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, TypeVar

from lockstep.agents.conversation import Conversation, Turn
from lockstep.agents.interactions.interaction import BaseInteraction
from lockstep.agents.loops.agent_loop import AgentLoop, Setup, has_had_its_turns, register
from lockstep.agents.renderer import content_of
from lockstep.agents.tool_parser import FunctionCall, ToolParser
from lockstep.agents.tools.calls import (
    CallLimits,
    CallResult,
    ToolError,
    ToolSession,
    checked_text,
    finite,
    run_contained,
)
from lockstep.agents.tools.tool import BaseTool
from lockstep.registry import name_from_data

T = TypeVar("T")

MALFORMED = "Error: the tool call could not be parsed; check its format and that it is complete"


class AgentState(Enum):
    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@register("tool_agent")
class ToolAgent(AgentLoop):
    uses_tools = True

    def __init__(self, setup: Setup, **options: Any) -> None:
        super().__init__(setup, **options)
        config = setup.config
        self.parser = ToolParser.get_tool_parser(config.format, setup.renderer.tokenizer)
        self.schemas = [tool.tool_schema for tool in setup.tools.values()]
        self.limits = CallLimits.of(config)

    def check_row(self, row: Mapping[str, Any]) -> None:
        name = (row.get("interaction_kwargs") or {}).get("name")
        known = self.setup.interactions
        if row.get("interaction_kwargs"):
            remedy = "add an entry with this `name` to actor_rollout_ref.rollout.multi_turn.interaction_config_path"
            name = name_from_data("interaction_kwargs.name", name, "interaction", known, remedy)
            known[name].check_kwargs({key: value for key, value in row["interaction_kwargs"].items() if key != "name"})
        if not self.setup.tools and not name:
            raise ValueError(
                "agent_name='tool_agent' needs tools or an interaction: set actor_rollout_ref.rollout.multi_turn."
                "tool_config_path, function_tool_path or interaction_config_path"
            )
        check_tools_kwargs(row, self.setup.tools)

    async def run(self, conversation: Conversation) -> None:
        instance_id = str(uuid.uuid4())
        row = conversation.row
        takes_images = self.setup.renderer.encoder is not None
        tools_kwargs = row.get("tools_kwargs") or {}
        session = ToolSession(self.setup.tools, tools_kwargs, self.limits, instance_id, row, takes_images=takes_images)
        name = (conversation.row.get("interaction_kwargs") or {}).get("name")
        interaction = self.setup.interactions[name] if name else None
        try:
            try:
                await self._run(conversation, session, interaction, instance_id)
            except ToolError:  # the interaction failed: nobody answers the policy any more
                conversation.counts.tool_errors += 1
            conversation.note_rewards(await session.close())
        finally:
            await session.release()
            if interaction is not None:
                with suppress(ToolError):
                    await self._contained(interaction, lambda: interaction.finalize_interaction(instance_id))

    async def _run(
        self, conversation: Conversation, session: ToolSession, interaction: BaseInteraction | None, instance_id: str
    ) -> None:
        state = AgentState.PENDING
        calls: list[FunctionCall] = []
        num_malformed = 0
        while state is not AgentState.TERMINATED:
            if state is AgentState.PROCESSING_TOOLS:
                goes_on = await self._call_tools(conversation, session, calls, num_malformed)
                state = AgentState.GENERATING if goes_on else AgentState.TERMINATED
            elif state is AgentState.INTERACTING:
                assert interaction is not None
                goes_on = await self._interact(conversation, interaction, instance_id)
                state = AgentState.GENERATING if goes_on else AgentState.TERMINATED
            else:
                turn = await conversation.generate(self.parser.stop_token_ids)
                calls, num_malformed = await self._parse(conversation, turn)
                state = self._next_state(conversation, turn, bool(calls or num_malformed), interaction is not None)

    def _next_state(self, conversation: Conversation, turn: Turn, has_calls: bool, has_interaction: bool) -> AgentState:
        if not turn.ended or not (has_calls or has_interaction):
            return AgentState.TERMINATED
        if not has_calls:
            return AgentState.INTERACTING
        if has_had_its_turns(conversation, self.setup.config):
            conversation.finish_reason = "turns"
            return AgentState.TERMINATED
        return AgentState.PROCESSING_TOOLS

    async def _parse(self, conversation: Conversation, turn: Turn) -> tuple[list[FunctionCall], int]:
        """The calls of a turn, and how many could not be parsed."""
        if not self.setup.tools or not turn.ended:
            return [], 0
        content, calls = await self.parser.extract_tool_calls(turn.token_ids, self.schemas)
        num_malformed = max(0, self.parser.count_calls(turn.text) - len(calls))
        conversation.counts.malformed_calls += num_malformed
        if calls:
            message = conversation.messages[-1]
            message["content"] = content.removesuffix(self._end_text(turn)) if content else ""
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for call_id, c in zip(_ids_of(calls), calls)
            ]
        return calls, num_malformed

    def _end_text(self, turn: Turn) -> str:
        text: str = self.setup.renderer.tokenizer.decode(turn.token_ids[-1:], skip_special_tokens=False)
        return text

    async def _call_tools(
        self, conversation: Conversation, session: ToolSession, calls: list[FunctionCall], num_malformed: int
    ) -> bool:
        """Answer the first `max_parallel_calls` calls of a turn; False if the conversation cannot go on."""
        run = calls[: self.setup.config.max_parallel_calls]
        results = list(await asyncio.gather(*(session.call(call) for call in run)))
        for result in results:
            conversation.note_call(result)
        if num_malformed:
            results.append(CallResult(name="error", text=MALFORMED, failed="malformed"))
        ids = [*_ids_of(run), call_id_of(len(run))]
        messages = self.setup.renderer.tool_messages(
            [(r.name, i, content_of(r.text, r.images)) for i, r in zip(ids, results)]
        )
        return conversation.add(messages)

    async def _interact(self, conversation: Conversation, interaction: BaseInteraction, instance_id: str) -> bool:
        """Score the turn and answer it; False if the conversation cannot go on. The last turn is scored too."""
        messages = list(conversation.messages)
        if not conversation.turn_scores:
            kwargs = {k: v for k, v in conversation.row["interaction_kwargs"].items() if k != "name"}
            await self._contained(interaction, lambda: interaction.start_interaction(instance_id, **kwargs))

        async def respond() -> tuple[bool, str, float]:
            ends, text, score, _ = await interaction.generate_response(instance_id, messages)
            return bool(ends), "" if ends else checked_text("the interaction", text), finite(score)

        ends, text, score = await self._contained(interaction, respond)
        conversation.turn_scores.append(score)
        if ends:
            return False
        if has_had_its_turns(conversation, self.setup.config):
            conversation.finish_reason = "turns"
            return False
        return conversation.add([{"role": "user", "content": text}])

    async def _contained(self, interaction: BaseInteraction, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await run_contained("interaction", interaction.name, start, self.limits.timeout_s)


def check_tools_kwargs(row: Mapping[str, Any], tools: Mapping[str, BaseTool]) -> None:
    """ValueError if the row has arguments for a tool that is not there."""
    if unknown := sorted(set(row.get("tools_kwargs") or {}) - set(tools)):
        raise ValueError(
            f"tools_kwargs has {', '.join(unknown)}, but the tools are {', '.join(tools) or 'none'}; see "
            "actor_rollout_ref.rollout.multi_turn.tool_config_path"
        )


def _ids_of(calls: Sequence[FunctionCall]) -> list[str]:
    return [call.id or call_id_of(number) for number, call in enumerate(calls)]


def call_id_of(number: int) -> str:
    """Nine characters, which some templates require."""
    return f"call{number:05d}"
