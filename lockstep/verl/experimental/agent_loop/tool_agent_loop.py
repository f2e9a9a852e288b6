"""verl.experimental.agent_loop.tool_agent_loop: the loop with tools and interactions as a machine of states on token ids.

    PENDING ─► GENERATING ─► PROCESSING_TOOLS ─► GENERATING ─► … ─► TERMINATED
                         └─► INTERACTING ─────► GENERATING

A subclass overrides the handler of a state, or `_call_tool`. The built-in `tool_agent` does the same on whole messages.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from lockstep.agents.interactions.interaction import BaseInteraction
from lockstep.agents.loops import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, AgentState as AgentState
from lockstep.agents.loops.agent_loop import AgentLoop, Setup
from lockstep.agents.loops.tool_agent import call_id_of
from lockstep.agents.renderer import TooLongError, content_of
from lockstep.agents.schemas import ToolResponse
from lockstep.agents.tool_parser import FunctionCall, ToolParser
from lockstep.agents.tools.calls import CallLimits, ToolError, ToolSession, checked_text, finite, run_contained
from lockstep.agents.tools.tool import BaseTool
from lockstep.verl.utils.profiler import simple_timer
from lockstep.verl.utils.rollout_trace import rollout_trace_op

T = TypeVar("T")


class AgentData:
    """The state of one conversation, which handlers and tools read and change.

    prompt_ids:    all tokens so far; response_mask covers those after the prompt, 1 = sampled by the policy.
    response_ids:  the last turn of the policy.
    tool_calls:    its calls.
    extra_fields:  free for tools and subclasses; not part of the batch.
    """

    def __init__(
        self,
        messages: list[dict[str, Any]],
        image_data: Any,
        video_data: Any,
        metrics: dict[str, Any],
        request_id: str,
        tools_kwargs: Mapping[str, Any],
        interaction: BaseInteraction | None = None,
        interaction_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages = messages
        self.image_data, self.video_data = image_data, video_data
        self.metrics = metrics
        self.request_id = request_id
        self.tools_kwargs = tools_kwargs
        self.interaction = interaction
        self.interaction_kwargs = dict(interaction_kwargs or {})
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.user_turns = 0
        self.assistant_turns = 0
        self.tool_calls: list[FunctionCall] = []
        self.extra_fields: dict[str, Any] = {}


class ToolAgentLoop(AgentLoopBase):
    """Calls tools, or an interaction, after each turn until a turn has no calls or a limit is reached.

    run_setup: tools and interactions of the run.
    """

    def __init__(self, *args: Any, run_setup: Setup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if run_setup is None:
            raise ValueError("ToolAgentLoop is constructed by a run: name it in agent_loop_config_path or agent_name")
        rollout = self.config.actor_rollout_ref.rollout
        multi_turn = rollout.multi_turn
        self.setup = run_setup
        self.tools: Mapping[str, BaseTool] = run_setup.tools
        self.tool_schemas = [tool.tool_schema.model_dump(exclude_unset=True) for tool in self.tools.values()]
        self.interaction_map: Mapping[str, BaseInteraction] = run_setup.interactions
        self.tool_parser = ToolParser.get_tool_parser(multi_turn.format, self.tokenizer)
        self.max_user_turns = multi_turn.max_user_turns
        self.max_assistant_turns = multi_turn.max_assistant_turns
        self.max_parallel_calls = multi_turn.max_parallel_calls
        self.prompt_length, self.response_length = rollout.prompt_length, rollout.response_length
        self._limits = CallLimits.of(multi_turn)

    @classmethod
    def create(cls, setup: Setup, **options: Any) -> AgentLoop:
        loop = super().create(setup, run_setup=setup, **options)
        loop.uses_tools = True
        return loop

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Hold one conversation. kwargs: the row's columns."""
        asked = dict(kwargs.get("interaction_kwargs") or {})
        interaction = self._interaction(asked)
        data = AgentData(
            messages=[dict(message) for message in kwargs["raw_prompt"]],
            image_data=None,
            video_data=None,
            metrics={},
            request_id=uuid4().hex,
            tools_kwargs=kwargs.get("tools_kwargs") or {},
            interaction=interaction,
            interaction_kwargs=asked,
        )
        self._session = ToolSession(
            self.tools,
            data.tools_kwargs,
            self._limits,
            data.request_id,
            kwargs,
            takes_images=self.setup.renderer.encoder is not None,
        )
        try:
            await self._start_interaction(data)
            state = AgentState.PENDING
            while state is not AgentState.TERMINATED:
                state = await self._next(state, data, sampling_params)
            self._keep_rewards(data, await self._session.close())
        finally:
            await self._session.release()
            if interaction is not None:
                with suppress(ToolError):
                    await self._contained(interaction, lambda: interaction.finalize_interaction(data.request_id))
        return self._output(data)

    async def _start_interaction(self, data: AgentData) -> None:
        """If it fails, the policy has one turn that nobody answers."""
        interaction = data.interaction
        if interaction is None:
            return
        arguments = {name: value for name, value in data.interaction_kwargs.items() if name != "name"}
        try:
            await self._contained(interaction, lambda: interaction.start_interaction(data.request_id, **arguments))
        except ToolError:
            self.server_manager.conversation.counts.tool_errors += 1
            data.interaction = None

    async def _next(self, state: AgentState, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        if state is AgentState.PENDING:
            return await self._handle_pending_state(data, sampling_params)
        if state is AgentState.GENERATING:
            return await self._handle_generating_state(data, sampling_params)
        if state is AgentState.PROCESSING_TOOLS:
            return await self._handle_processing_tools_state(data)
        return await self._handle_interacting_state(data)

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        """Render the prompt."""
        agent_data.prompt_ids = await self.apply_chat_template(agent_data.messages, tools=self.tool_schemas or None)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        """Generate a turn and look for calls. ignore_termination: go on even if the response is full."""
        with simple_timer("generate_sequences", agent_data.metrics):
            room = self.response_length - len(agent_data.response_mask)
            stops = list(self.tool_parser.stop_token_ids)
            output = await self.server_manager.generate(
                request_id=agent_data.request_id,
                prompt_ids=agent_data.prompt_ids,
                sampling_params={**sampling_params, "max_tokens": room, "stop_token_ids": stops},
            )
        agent_data.assistant_turns += 1
        agent_data.response_ids = list(output.token_ids)
        agent_data.prompt_ids = agent_data.prompt_ids + agent_data.response_ids
        agent_data.response_mask += [1] * len(agent_data.response_ids)
        agent_data.response_logprobs += output.log_probs
        is_full = not ignore_termination and len(agent_data.response_mask) >= self.response_length
        await self._add_turn(agent_data, has_calls=not is_full)
        if is_full:
            return AgentState.TERMINATED
        if agent_data.interaction is not None and not agent_data.tool_calls:
            return AgentState.INTERACTING
        if not agent_data.tool_calls or self._has_had_its_turns(agent_data):
            return AgentState.TERMINATED
        return AgentState.PROCESSING_TOOLS

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Call the tools and append their responses."""
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        with simple_timer("tool_calls", agent_data.metrics):
            results = await asyncio.gather(
                *(self._call_tool(call, agent_data.tools_kwargs, agent_data) for call in calls)
            )
        if any(response.video for response, _, _ in results):
            raise ValueError("_call_tool returned a video; text and images are supported")
        agent_data.tool_rewards += [reward for _, reward, _ in results if reward is not None]
        contents = [
            (call.name, call.id or call_id_of(number), content_of(response.text or "", response.image or ()))
            for number, (call, (response, _, _)) in enumerate(zip(calls, results))
        ]
        return self._append(agent_data, self.setup.renderer.tool_messages(contents))

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Let the interaction score the turn and answer it. The last turn is scored too."""
        interaction, messages = agent_data.interaction, list(agent_data.messages)
        assert interaction is not None

        async def respond() -> tuple[bool, str, float]:
            ends, text, score, _ = await interaction.generate_response(
                agent_data.request_id, messages, **agent_data.interaction_kwargs
            )
            return bool(ends), "" if ends else checked_text("the interaction", text), finite(score)

        try:
            ends, text, score = await self._contained(interaction, respond)
        except ToolError:
            self.server_manager.conversation.counts.tool_errors += 1
            return AgentState.TERMINATED
        agent_data.turn_scores.append(score)
        if ends or self._has_had_its_turns(agent_data):
            return AgentState.TERMINATED
        return self._append(agent_data, [{"role": "user", "content": text}])

    async def _contained(self, interaction: BaseInteraction, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await run_contained("interaction", interaction.name, start, self._limits.timeout_s)

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: Mapping[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """The response to one call; a tool that fails answers with its error."""
        result = await self._session.call(tool_call)
        self.server_manager.conversation.note_call(replace(result, reward=None))
        return ToolResponse(text=result.text, image=list(result.images) or None), result.reward, {}

    def _append(self, agent_data: AgentData, messages: Sequence[dict[str, Any]]) -> AgentState:
        """Append messages of others as context; the conversation ends if they leave no room for a turn."""
        renderer, room = self.setup.renderer, self.response_length - len(agent_data.response_mask)
        before = [message for message in agent_data.messages if message["role"] in ("system", "assistant")]
        try:
            added = renderer.plain_messages(messages, max_tokens=self.response_length)
            bridge = renderer.bridge(
                before, added, agent_data.prompt_ids[-1], self.tool_schemas or None, max_tokens=room
            )
        except TooLongError:
            return AgentState.TERMINATED
        if bridge is None or len(bridge.ids) >= room:
            return AgentState.TERMINATED
        agent_data.messages += added
        self.server_manager.conversation.trajectory.add_images(bridge.images)
        agent_data.prompt_ids = agent_data.prompt_ids + bridge.ids
        agent_data.response_mask += [0] * len(bridge.ids)
        agent_data.response_logprobs += [0.0] * len(bridge.ids)
        agent_data.user_turns += 1
        return AgentState.GENERATING

    def _has_had_its_turns(self, agent_data: AgentData) -> bool:
        assistant = agent_data.assistant_turns, self.max_assistant_turns
        user = agent_data.user_turns, self.max_user_turns
        return any(limit and count >= limit for count, limit in (assistant, user))

    async def _add_turn(self, agent_data: AgentData, has_calls: bool) -> None:
        """Append the policy's turn to the messages. has_calls: look for calls, which a turn that was cut off has none of."""
        content, agent_data.tool_calls = "", []
        if has_calls:
            schemas = [tool.tool_schema for tool in self.tools.values()]
            content, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(agent_data.response_ids, schemas)
        agent_data.messages.append(self._assistant_message(agent_data, content))

    def _assistant_message(self, agent_data: AgentData, content: str) -> dict[str, Any]:
        text = self.tokenizer.decode(agent_data.response_ids, skip_special_tokens=True)
        if not agent_data.tool_calls:
            return {"role": "assistant", "content": text}
        if agent_data.response_ids[-1] in self.setup.renderer.stop_ids:
            content = content.removesuffix(self.tokenizer.decode(agent_data.response_ids[-1:]))
        functions = [{"name": call.name, "arguments": call.arguments} for call in agent_data.tool_calls]
        ids = [call.id or call_id_of(number) for number, call in enumerate(agent_data.tool_calls)]
        calls = [{"id": i, "type": "function", "function": function} for i, function in zip(ids, functions)]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def _interaction(self, kwargs: Mapping[str, Any]) -> BaseInteraction | None:
        if not kwargs:
            return None
        name = str(kwargs.get("name"))
        if name not in self.interaction_map:
            known = ", ".join(self.interaction_map) or "none"
            raise ValueError(f"interaction_kwargs.name={name!r} is not an interaction of the config (known: {known})")
        return self.interaction_map[name]

    def _keep_rewards(self, data: AgentData, by_tool: Mapping[str, float | None]) -> None:
        conversation = self.server_manager.conversation
        conversation.note_rewards(by_tool)
        conversation.tool_rewards = list(data.tool_rewards)
        conversation.turn_scores = list(data.turn_scores)

    def _output(self, data: AgentData) -> AgentLoopOutput:
        start = len(data.prompt_ids) - len(data.response_mask)
        length = self.response_length
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:start],
            response_ids=data.prompt_ids[start : start + length],
            response_mask=data.response_mask[:length],
            response_logprobs=data.response_logprobs[:length],
            num_turns=data.user_turns + data.assistant_turns + 1,
            messages=data.messages,
            metrics=AgentLoopMetrics(**{k: v for k, v in data.metrics.items() if k in vars(AgentLoopMetrics())}),
        )
