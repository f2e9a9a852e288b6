"""Conversations in agent workers, from event loops of the controller; see `agent_worker.py` for the messages.

    hold ─► the worker with the fewest conversations ─► requests to `generate`, answers back ─► ConversationResult

If a worker dies, a new one takes its place and its conversations are started again.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lockstep.agents.conversation import ConversationResult, Generate
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.protocol.generation import SamplingParams
from lockstep.single_controller.futures import WorkerDiedError
from lockstep.single_controller.message_process import MessageProcess
from lockstep.utils.event_loop import cancelled
from lockstep.utils.progress import waiting
from lockstep.workers.agent_worker import (
    KEY,
    Answer,
    Ask,
    Begin,
    Cancel,
    End,
    FromWorker,
    Ready,
    ToWorker,
    Withdraw,
    all_messages,
)

logger = logging.getLogger(__name__)

Start = Callable[[int], MessageProcess]
"""Starts the process of the agent worker with this number."""

MAX_STARTS = 3
"""How often a conversation is started: it may be the cause of the deaths. So many deaths in a row of workers that were not ready
yet are a failure."""


@dataclass(eq=False)
class _Held:
    """A conversation. inbox: messages of its worker, or a failure of the policy, for the event loop that waits for it."""

    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[FromWorker | Exception] = field(default_factory=asyncio.Queue)

    def put(self, message: FromWorker) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # its event loop has ended
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, message)


class _Link:
    """A worker, and the threads that send and receive its messages.

    held:   its conversations, by id.
    on_end: called with the exception that ends the receiving thread.
    """

    def __init__(
        self, process: MessageProcess, on_ready: Callable[[], None], on_end: Callable[["_Link", Exception], None]
    ) -> None:
        self.process = process
        self.held: dict[int, _Held] = {}
        self.is_ready = False
        self._on_ready, self._on_end = on_ready, on_end
        self._outgoing: queue.SimpleQueue[ToWorker | None] = queue.SimpleQueue()
        for target in (self._send, self._receive):
            threading.Thread(target=target, name="agents", daemon=True).start()

    def put(self, message: ToWorker) -> None:
        self._outgoing.put(message)

    def close(self) -> None:
        self._outgoing.put(None)
        self.process.close()

    def _send(self) -> None:
        while None not in (messages := all_messages(self._outgoing)):
            try:
                self.process.send(messages)
            except WorkerDiedError:  # `_receive` reports it
                return
            except Exception as error:  # noqa: BLE001 - pickling runs user code, which may raise anything
                problem = ValueError(f"a row cannot be sent to agent workers ({error}); set {KEY}=0")
                for message in messages:
                    if message is not None and (held := self.held.get(message.id)) is not None:
                        held.put(End(message.id, error=problem))

    def _receive(self) -> None:
        try:
            while True:
                for message in self.process.receive():
                    self._deliver(message)
        except Exception as error:  # noqa: BLE001 - handed to the conversations
            self._on_end(self, error)

    def _deliver(self, message: FromWorker) -> None:
        if not isinstance(message, Ready):
            if (held := self.held.get(message.id)) is not None:
                held.put(message)
        elif message.error is not None:
            raise message.error
        else:
            self.is_ready = True
            self._on_ready()


class AgentClient:
    """Holds conversations as `Agents` does, in `config.agent.num_workers` processes.

    config:       that of the rollout.
    num_replaced: workers that died and were replaced.
    """

    def __init__(self, config: RolloutConfig, start: Start) -> None:
        self.config = config
        self._start = start
        self._ids = count()
        self._changed = threading.Condition()
        """Held while workers are replaced or get a conversation."""
        self._failure: Exception | None = None
        self._is_closed = False
        self.num_replaced = 0
        self._num_unready_deaths = 0  # in a row
        self._links = [self._link(number) for number in range(config.agent.num_workers)]

    def wait_ready(self) -> None:
        """Wait until all workers can hold conversations; raises the exception of one that cannot."""
        with self._changed, waiting("worker", "agent workers, being started"):
            self._changed.wait_for(lambda: self._failure is not None or all(link.is_ready for link in self._links))
        if self._failure is not None:
            raise self._failure

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The workers run until `close`."""
        yield

    async def hold(
        self, row: Mapping[str, Any], prompt_ids: Sequence[int], generate: Generate, sampling: SamplingParams, seed: int
    ) -> ConversationResult:
        """One sample of a row, as `Agents.hold`. Cancelling this call ends the conversation."""
        for is_last in [False] * (MAX_STARTS - 1) + [True]:
            begin, held = Begin(next(self._ids), row, prompt_ids, sampling, seed), _Held(asyncio.get_running_loop())
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                link = min(self._links, key=lambda link: len(link.held))
                link.held[begin.id] = held
            try:
                return await self._hold(link, held, begin, generate)
            except WorkerDiedError as error:
                if link in self._links:  # the policy's worker died, or this client failed
                    raise
                if is_last:
                    cause = f"a conversation lost its agent worker {MAX_STARTS} times, and may be the cause: {error}"
                    raise WorkerDiedError(cause) from error
        raise AssertionError("unreachable")

    async def _hold(self, link: _Link, held: _Held, begin: Begin, generate: Generate) -> ConversationResult:
        answers: dict[int, asyncio.Task[None]] = {}

        async def answer(ask: Ask) -> None:
            try:
                link.put(Answer(ask.id, ask.number, await generate(ask.request)))
            except Exception as error:  # noqa: BLE001 - raised by `hold`
                held.inbox.put_nowait(error)
            finally:
                del answers[ask.number]
                wait_for_worker()

        wait = ExitStack()

        def wait_for_worker() -> None:
            wait.close()
            if not answers:  # else for the policy
                wait.enter_context(waiting("worker", link.process.name))

        link.put(begin)
        wait_for_worker()
        try:
            while not isinstance(message := await held.inbox.get(), End):
                if isinstance(message, Ask):
                    answers[message.number] = asyncio.create_task(answer(message))
                    wait_for_worker()
                elif isinstance(message, Withdraw) and message.number in answers:
                    answers[message.number].cancel()
                elif isinstance(message, Exception):
                    raise message
        except (Exception, asyncio.CancelledError):
            link.put(Cancel(begin.id))
            while not isinstance(await held.inbox.get(), End):  # it has released its tools then
                pass
            raise
        finally:
            await cancelled(list(answers.values()))
            wait.close()
            del link.held[begin.id]
        if message.error is not None:
            raise message.error
        assert message.result is not None, "only `hold` cancels"
        return message.result

    def close(self) -> None:
        """End the workers and their conversations."""
        with self._changed:
            self._is_closed = True
        for link in self._links:
            link.close()

    def _link(self, number: int) -> _Link:
        return _Link(self._start(number), self._notify, self._replace)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _replace(self, link: _Link, error: Exception) -> None:
        """The link has ended: start another worker in its place, unless that would not help, and let go of its conversations."""
        with self._changed:
            try:
                if self._is_closed or not isinstance(error, WorkerDiedError):
                    raise error
                self._num_unready_deaths = 0 if link.is_ready else self._num_unready_deaths + 1
                if self._num_unready_deaths >= MAX_STARTS:
                    raise error
                logger.warning("%s; starting its %d conversations again", error, len(link.held))
                self._links[self._links.index(link)] = self._link(self._links.index(link))
                self.num_replaced += 1
            except Exception as failure:  # noqa: BLE001 - raised by `hold`
                self._failure = self._failure or failure
            for id, held in list(link.held.items()):
                held.put(End(id, error=error))
            self._changed.notify_all()
        link.close()
