"""Agent workers: processes that hold conversations, so that tools and templates do not share the controller's interpreter.

    controller (`AgentClient`)          agent worker
    Begin: a row, its prompt ─────────► Agents.hold
           RolloutClient     ◄───────── Ask: a generation request      (Withdraw: its answer is not needed any more)
    Answer: its completion ───────────► Conversation.generate
                             ◄───────── End: the ConversationResult, or the exception

The controller alone talks to the rollout's engines, so pauses and policy versions are as without agent workers.
"""

import asyncio
import functools
import os
import pickle
import queue
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from lockstep.agents.agents import Agents
from lockstep.agents.conversation import ConversationResult
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.data import ImageDataConfig
from lockstep.models.processor import hf_processor
from lockstep.models.tokenizer import eos_token_ids, hf_tokenizer
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from lockstep.rewards import sandbox
from lockstep.single_controller.futures import picklable
from lockstep.utils.event_loop import cancelled
from lockstep.utils.model_path import base_folder, local_model_folder

T = TypeVar("T")

NAME = "agent worker"
KEY = "actor_rollout_ref.rollout.agent.num_workers"
CLOSE_TIMEOUT_S = 4.0
"""How long conversations may take to end when the worker is closed."""


@dataclass(frozen=True)
class AgentSetup:
    """What the agents of a run are made from, in any of its processes.

    tokenizer:       arguments of `hf_tokenizer`.
    model:           `actor_rollout_ref.model.path`.
    template_kwargs: `data.apply_chat_template_kwargs`.
    sandbox:         `reward_model.sandbox`, for tools that run code.
    data_files:      `data.train_files` and `data.val_files`.
    images:          the pixel limits of images that tools return.
    """

    rollout: RolloutConfig
    tokenizer: Mapping[str, Any]
    model: str
    template_kwargs: Mapping[str, Any]
    sandbox: str
    data_files: Sequence[str] = ()
    images: ImageDataConfig = field(default_factory=ImageDataConfig)

    def make_agents(self, tokenizer: Any = None) -> Agents:
        """tokenizer: if it is loaded already."""
        key = "actor_rollout_ref.model.path"
        folder = base_folder(local_model_folder(self.model, key, weights=False), key, weights=False)
        tokenizer = tokenizer or hf_tokenizer(**self.tokenizer)
        sandbox.configure(self.sandbox)
        stop_ids = eos_token_ids(tokenizer, folder)
        trust = bool(self.tokenizer.get("trust_remote_code", False))
        processor = hf_processor(self.model, tokenizer, self.images, trust, key)
        return Agents(self.rollout, tokenizer, stop_ids, self.template_kwargs, self.data_files, processor)


@dataclass(frozen=True)
class Begin:
    """Hold a conversation; see `Agents.converse`."""

    id: int
    row: Mapping[str, Any]
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class Cancel:
    """End a conversation; its End has no result."""

    id: int


@dataclass(frozen=True)
class Ask:
    """number: of the request within its conversation."""

    id: int
    number: int
    request: GenerationRequest


@dataclass(frozen=True)
class Withdraw:
    id: int
    number: int


@dataclass(frozen=True)
class Answer:
    id: int
    number: int
    completion: Completion


@dataclass(frozen=True)
class End:
    """result: None if the conversation was cancelled or failed."""

    id: int
    result: ConversationResult | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Ready:
    """The first message of a worker. error: why it cannot hold conversations."""

    error: Exception | None = None


FromWorker = Ready | Ask | Withdraw | End
ToWorker = Begin | Answer | Cancel


def all_messages(messages: "queue.SimpleQueue[T]") -> list[T]:
    """All messages of the queue, at least one."""
    found = [messages.get()]
    while not messages.empty():
        found.append(messages.get())
    return found


def _check_picklable(result: ConversationResult) -> None:
    """ValueError if a loop of the user has put something into the conversation that would kill the worker when it is sent."""
    try:
        pickle.dumps(result)
    except Exception as error:  # pickling runs user code, which may raise anything
        raise ValueError(f"the conversation cannot be sent to the controller ({error}); set {KEY}=0") from error


class AgentWorker:
    """A `Peer` of the controller. Conversations run in the event loop of its thread. name: NAME and a number."""

    def __init__(self, name: str, setup: AgentSetup) -> None:
        self._note = f"raised in {name}, pid {os.getpid()}"
        self._setup = setup
        self._outgoing: queue.SimpleQueue[FromWorker] = queue.SimpleQueue()
        self._conversations: dict[int, asyncio.Task[End]] = {}
        self._answers: dict[tuple[int, int], asyncio.Future[Completion]] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def push(self, messages: list[ToWorker]) -> None:
        self._loop.call_soon_threadsafe(self._take, messages)

    def pull(self) -> list[FromWorker]:
        return all_messages(self._outgoing)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._run())
        except BaseException:  # noqa: BLE001 - a thread that ends would leave the controller waiting
            traceback.print_exc()
            os._exit(1)

    async def _run(self) -> None:
        try:
            self._agents = self._setup.make_agents()
            self._agents.renderer  # noqa: B018 - checks the chat template
        except Exception as error:  # noqa: BLE001 - the boundary between worker and controller
            self._outgoing.put(Ready(picklable(error, self._note)))
            return
        async with self._agents.running():
            self._outgoing.put(Ready())
            await self._closing.wait()
            await cancelled(list(self._conversations.values()))
        self._agents.close()

    def _take(self, messages: list[ToWorker]) -> None:
        for message in messages:
            if isinstance(message, Begin):
                conversation = self._conversations[message.id] = self._loop.create_task(self._hold(message))
                conversation.add_done_callback(functools.partial(self._end, message.id))
            elif isinstance(message, Answer):
                future = self._answers.get((message.id, message.number))
                if future is not None and not future.done():
                    future.set_result(message.completion)
            elif message.id in self._conversations:
                self._conversations[message.id].cancel()

    async def _hold(self, begin: Begin) -> End:
        numbers = count()

        async def generate(request: GenerationRequest) -> Completion:
            key = begin.id, next(numbers)
            future = self._answers[key] = asyncio.get_running_loop().create_future()
            self._outgoing.put(Ask(*key, request))
            try:
                return await future
            except asyncio.CancelledError:
                self._outgoing.put(Withdraw(*key))
                raise
            finally:
                del self._answers[key]

        try:
            result = await self._agents.hold(begin.row, begin.prompt_ids, generate, begin.sampling, begin.seed)
            _check_picklable(result)
            return End(begin.id, result)
        except Exception as error:  # noqa: BLE001 - the boundary between worker and controller
            return End(begin.id, error=picklable(error, self._note))
        except SystemExit as error:  # it would end the event loop
            failure = RuntimeError(repr(error))
            failure.__cause__ = error
            return End(begin.id, error=picklable(failure, self._note))

    def _end(self, id: int, conversation: "asyncio.Task[End]") -> None:
        del self._conversations[id]
        self._outgoing.put(End(id) if conversation.cancelled() else conversation.result())
