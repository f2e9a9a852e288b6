"""The agent loops of a run: which row is served by which, and how a row becomes a conversation.

row ─► agent_name ─► AgentLoop.run(Conversation) ─► trajectories, counts, rewards of tools and turns
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import Any

from lockstep.agents import environments  # noqa: F401 (registers its loops)
from lockstep.agents.conversation import Conversation, ConversationResult, Generate
from lockstep.agents.interactions.load import load_interactions
from lockstep.agents.loops import AGENT_LOOPS, AgentLoop, Setup
from lockstep.agents.renderer import Renderer
from lockstep.agents.tool_parser import ToolParser
from lockstep.agents.tools.load import close_tools, load_tools, read_entries
from lockstep.agents.tools.threads import end_child_processes
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.data.image_prompts import ImageEncoder
from lockstep.protocol.generation import SamplingParams
from lockstep.registry import did_you_mean, load_plugin, name_from_data

LOOPS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
DEFAULT_KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"
SINGLE_TURN = "single_turn_agent"
VERL_LOOPS = {
    "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop": SINGLE_TURN,
    "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop": "tool_agent",
}
"""verl's classes that have a counterpart here."""


class _Running:
    """The loops that are running on an event loop."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._entered: set[AgentLoop] = set()
        self._lock = asyncio.Lock()

    async def enter(self, loop: AgentLoop) -> None:
        async with self._lock:
            if loop not in self._entered:
                await self._stack.enter_async_context(loop.running())
                self._entered.add(loop)


class Agents:
    """Reads the tools, interactions and loops of a config; ValueError with the key if something in them is wrong.

    stop_ids:        tokens that end a response of the model.
    template_kwargs: `data.apply_chat_template_kwargs`.
    data_files:      `data.train_files` and `data.val_files`.
    processor:       of a model that reads images, with the tokenizer.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        tokenizer: Any,
        stop_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        data_files: Sequence[str] = (),
        processor: Any = None,
    ) -> None:
        self.config = rollout
        self.tokenizer = tokenizer
        self._processor = processor
        self._stop_ids = stop_ids
        self._template_kwargs = template_kwargs
        self._data_files = data_files
        multi_turn = rollout.multi_turn
        self.interactions = load_interactions(multi_turn.interaction_config_path)
        path = rollout.agent.agent_loop_config_path
        self._entries = {} if path is None else _read_loops(path)
        self._loops: dict[str, AgentLoop] = {}
        self._running: dict[asyncio.AbstractEventLoop, _Running] = {}
        # last: if something else is wrong, no server of tools is left running
        self.tools = load_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)
        self.schemas = [tool.tool_schema.model_dump(exclude_unset=True) for tool in self.tools.values()]

    def close(self) -> None:
        """End what the tools keep, such as sessions of MCP servers, and processes that their calls left running."""
        close_tools(self.tools.values())
        end_child_processes()

    @cached_property
    def renderer(self) -> Renderer:
        parser = ToolParser.get_tool_parser(self.config.multi_turn.format, self.tokenizer)
        stop_ids = {*self._stop_ids, *self.config.stop_token_ids, *parser.stop_token_ids}
        encoder = None if self._processor is None else ImageEncoder(self._processor)
        renderer = Renderer(self.tokenizer, sorted(stop_ids), self._template_kwargs, encoder)
        renderer.check()
        return renderer

    def name_of(self, row: Mapping[str, Any]) -> str:
        """The name of the row's loop; ValueError if neither the config nor the registry has it."""
        name = row.get("agent_name")
        default = self.config.agent.default_agent_loop
        if not name:
            return default
        remedy = f"give your own loop a `name` in an entry of {LOOPS_KEY}, with its `_target_`"
        return name_from_data("agent_name", name, "agent loop", {*AGENT_LOOPS, *self._entries, default}, remedy)

    def loop_of(self, row: Mapping[str, Any]) -> AgentLoop:
        """The row's loop; ValueError if there is none of that name."""
        name = self.name_of(row)
        if name not in self._loops:
            cls, options = self._entries.get(name) or (self._class_of(name), {})
            setup = Setup(self.config, self.renderer, self.tools, self.interactions, self._data_files)
            try:
                self._loops[name] = cls.create(setup, **options)
            except TypeError as error:
                raise ValueError(f"agent_name={name}: {error}") from error
        return self._loops[name]

    def _class_of(self, name: str) -> type[AgentLoop]:
        """A registered loop, or the one that the config's default refers to."""
        if name not in AGENT_LOOPS and ":" in name:
            own: type[AgentLoop] = load_plugin(DEFAULT_KEY, name, base=AgentLoop)
            return own
        if name not in AGENT_LOOPS:
            known = did_you_mean(name, {*AGENT_LOOPS, *self._entries})
            raise ValueError(f"{DEFAULT_KEY}={name}: no such agent loop. {known} See {LOOPS_KEY} for your own")
        cls = AGENT_LOOPS.get(name)
        if not (isinstance(cls, type) and issubclass(cls, AgentLoop)):
            raise ValueError(f"the agent loop {name!r} is not a subclass of lockstep.agents.AgentLoop")
        return cls

    def is_single_turn(self, row: Mapping[str, Any]) -> bool:
        return self.name_of(row) == SINGLE_TURN

    def tools_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The tools to render the row's prompt with."""
        if self.is_single_turn(row) or not self.loop_of(row).uses_tools:
            return None
        return self.schemas or None

    def check_row(self, row: Mapping[str, Any]) -> None:
        """ValueError if the row asks for something that its loop does not do."""
        if not self.is_single_turn(row):
            self.loop_of(row).check_row(row)
            return
        wanted = [name for name in ("tools_kwargs", "interaction_kwargs") if row.get(name)]
        wanted += ["need_tools_kwargs"] if (row.get("extra_info") or {}).get("need_tools_kwargs") else []
        if wanted:
            raise ValueError(
                f"has {wanted[0]}, but its loop {SINGLE_TURN} uses neither tools nor interactions; add the column agent_name with "
                f"tool_agent, set {DEFAULT_KEY}=tool_agent, or remove {wanted[0]}"
            )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Conversations of this event loop are held inside."""
        event_loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            self._running[event_loop] = _Running(stack)
            try:
                yield
            finally:
                del self._running[event_loop]

    async def hold(
        self, row: Mapping[str, Any], prompt_ids: Sequence[int], generate: Generate, sampling: SamplingParams, seed: int
    ) -> ConversationResult:
        """See `converse`."""
        return (await self.converse(row, prompt_ids, generate, sampling, seed)).result

    async def converse(
        self, row: Mapping[str, Any], prompt_ids: Sequence[int], generate: Generate, sampling: SamplingParams, seed: int
    ) -> Conversation:
        """One sample of a row."""
        loop = self.loop_of(row)
        if not self.is_single_turn(row) and not row.get("raw_prompt"):
            raise ValueError(
                f"agent loop {self.name_of(row)} needs the messages of the prompt: the dataset must return `raw_prompt`"
            )
        await self._running[asyncio.get_running_loop()].enter(loop)
        conversation = Conversation(
            row,
            prompt_ids,
            complete=generate,
            renderer=self.renderer,
            sampling=sampling,
            seed=seed,
            response_length=self.config.response_length,
            tools=self.tools_of(row) or (),
            follows_template=self.config.multi_turn.use_inference_chat_template,
        )
        await loop.run(conversation)
        if not (conversation.num_assistant_turns or conversation.failure):
            raise ValueError(f"agent loop {self.name_of(row)} ended without a turn of the policy")
        conversation.drop_unanswered()
        return conversation


def _read_loops(path: str) -> dict[str, tuple[type[AgentLoop], dict[str, Any]]]:
    """Name to class and options."""
    loops: dict[str, tuple[type[AgentLoop], dict[str, Any]]] = {}
    for number, entry in enumerate(read_entries(LOOPS_KEY, path, "agent_loops")):
        where = f"{LOOPS_KEY}={path}, entry {number}"
        options = dict(entry)
        name, target = options.pop("name", None), options.pop("_target_", None)
        if not isinstance(name, str) or not isinstance(target, str):
            raise ValueError(f"{where}: must have `name` and `_target_`")
        if target in VERL_LOOPS:
            loops[name] = (AGENT_LOOPS.get(VERL_LOOPS[target]), options)
            continue
        reference = target if ":" in target else ":".join(target.rsplit(".", 1))
        loops[name] = (load_plugin(where, reference, base=AgentLoop), options)
    return loops
