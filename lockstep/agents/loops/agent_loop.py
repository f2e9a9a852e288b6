"""The interface of agent loops, and their registry. A row's `agent_name` selects its loop."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from lockstep.agents.conversation import Conversation
from lockstep.agents.interactions.interaction import BaseInteraction
from lockstep.agents.renderer import Renderer
from lockstep.agents.tools.tool import BaseTool
from lockstep.config.actor_rollout_ref import MultiTurnConfig, RolloutConfig
from lockstep.registry import Registry, did_you_mean


@dataclass(frozen=True)
class Setup:
    """What loops are built from, once per run. data_files: `data.train_files` and `data.val_files`."""

    rollout: RolloutConfig
    renderer: Renderer
    tools: Mapping[str, BaseTool] = field(default_factory=dict)
    interactions: Mapping[str, BaseInteraction] = field(default_factory=dict)
    data_files: Sequence[str] = ()

    @property
    def config(self) -> MultiTurnConfig:
        return self.rollout.multi_turn


def options_of(cls: type["AgentLoop"]) -> set[str]:
    """The keys that an entry for this loop may have."""
    inits = [vars(base)["__init__"] for base in cls.__mro__ if issubclass(base, AgentLoop) and "__init__" in vars(base)]
    named = [parameter for init in inits for parameter in inspect.signature(init).parameters.values()]
    return {one.name for one in named if one.kind is not one.VAR_KEYWORD} - {"self", "setup"}


def has_had_its_turns(conversation: Conversation, config: MultiTurnConfig) -> bool:
    """Whether a limit on turns is reached."""
    assistant = conversation.num_assistant_turns, config.max_assistant_turns
    user = conversation.num_user_turns, config.max_user_turns
    return any(limit is not None and count >= limit for count, limit in (assistant, user))


class AgentLoop(ABC):
    """Decides what follows each turn of the policy. One object serves all conversations, many of them at once.

        @register("retry_once")
        class RetryOnce(AgentLoop):
            async def run(self, conversation: Conversation) -> None:
                turn = await conversation.generate()
                if "#### " not in turn.text and conversation.add([{"role": "user", "content": "Give the answer."}]):
                    await conversation.generate()

    uses_tools: whether prompts are rendered with the tools of the config.
    """

    uses_tools: bool = False

    def __init__(self, setup: Setup, **options: Any) -> None:
        """options: other keys of the loop's entry in `rollout.agent.agent_loop_config_path`."""
        self.setup = setup
        if options:
            unknown = min(options)
            known = options_of(type(self))
            guess = f". {did_you_mean(unknown, known)}" if known else ""
            raise TypeError(f"{type(self).__name__} has no option {unknown}{guess}")

    @classmethod
    def create(cls, setup: Setup, **options: Any) -> "AgentLoop":
        """The loop of a run."""
        return cls(setup, **options)

    def check_row(self, row: Mapping[str, Any]) -> None:  # noqa: B027
        """ValueError if the loop cannot serve a row; called for every row before training."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Conversations of this event loop are held inside; entered once per rollout."""
        yield

    @abstractmethod
    async def run(self, conversation: Conversation) -> None:
        """Hold the conversation."""


AGENT_LOOPS: Registry[type[AgentLoop]] = Registry("agent loop", key="agent_name")


def register(agent_name: str) -> Callable[[type[AgentLoop]], type[AgentLoop]]:
    """Class decorator: the loop of rows with this `agent_name`."""
    return AGENT_LOOPS.register(agent_name)


@register("single_turn_agent")
class SingleTurnAgent(AgentLoop):
    """One response to the prompt."""

    async def run(self, conversation: Conversation) -> None:
        await conversation.generate()
