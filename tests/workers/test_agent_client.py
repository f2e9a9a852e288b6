"""Conversations in agent workers: the same as in the controller, for every way that they can end."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from lockstep.agents.conversation import ConversationResult
from lockstep.config.actor_rollout_ref import AgentConfig, MultiTurnConfig, RolloutConfig
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from lockstep.single_controller.futures import WorkerDiedError, worker_report
from lockstep.single_controller.message_process import MessageProcess
from lockstep.utils.event_loop import all_of
from lockstep.workers.agent_client import MAX_STARTS, AgentClient
from lockstep.workers.agent_worker import AgentSetup, AgentWorker
from tests.agents.scripted import Scripted, call
from tests.tiny import save_tiny_model

PLUGINS = '''
import asyncio, threading, time

from lockstep.agents.loops import AgentLoop

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

class Own(AgentLoop):
    async def run(self, conversation):
        what = conversation.row["what"]
        if what == "key":
            raise KeyError("lost")
        if what == "value":
            raise ValueError("rows must have a color")
        if what == "exit":
            raise SystemExit(3)
        if what == "lock":
            await conversation.generate()
            conversation.messages.append({"role": "user", "content": threading.Lock()})
        if what == "twice":
            await asyncio.gather(conversation.complete(conversation.row["request"]), conversation.generate())
        if what == "withdraw":
            try:
                await asyncio.wait_for(conversation.complete(conversation.row["request"]), 0.05)
            except TimeoutError:
                await conversation.generate()
        if what == "wait":
            try:
                await conversation.generate()
            finally:
                await asyncio.sleep(0.05)
                conversation.row["released"].append(1)
'''


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> AgentSetup:
    folder = tmp_path_factory.mktemp("agents")
    save_tiny_model(folder / "model")
    (folder / "plugins.py").write_text(PLUGINS)
    rollout = RolloutConfig(
        seed=0,
        prompt_length=100,
        response_length=400,
        log_prob_use_dynamic_bsz=False,
        log_prob_max_token_len_per_gpu=1000,
        multi_turn=MultiTurnConfig(function_tool_path=f"{folder}/plugins.py:add"),
        agent=replace(AgentConfig(), default_agent_loop=f"{folder}/plugins.py:Own", num_workers=2),
    )
    return AgentSetup(rollout, {"path": folder / "model"}, str(folder / "model"), {}, "auto")


class InThisProcess(MessageProcess):
    """An agent worker without a process. `died`: stands for its death."""

    def __init__(self, setup: AgentSetup) -> None:
        self.name = "agent worker 0 of 2"
        self.worker = AgentWorker(self.name, setup)
        self.died = threading.Event()

    def send(self, messages: list[Any]) -> None:
        if self.died.is_set():
            raise WorkerDiedError("it died")
        self.worker.push(messages)

    def receive(self) -> list[Any]:
        messages = self.worker.pull()
        if self.died.is_set():
            raise WorkerDiedError("it died")
        return messages

    def die(self) -> None:
        self.died.set()
        self.worker._outgoing.put(None)  # type: ignore[arg-type] # wakes `receive`

    def close(self) -> None:
        self.worker.close()
        if not self.died.is_set():
            self.die()


class Workers:
    """A client whose workers are in this process."""

    def __init__(self, setup: AgentSetup) -> None:
        self.processes: list[InThisProcess] = []
        self._setup = setup
        self.client = AgentClient(setup.rollout, self._start)
        self.client.wait_ready()

    def _start(self, number: int) -> InThisProcess:
        self.processes.append(InThisProcess(self._setup))
        return self.processes[-1]


@pytest.fixture
def workers(setup: AgentSetup) -> Iterator[Workers]:
    workers = Workers(setup)
    yield workers
    workers.client.close()


def hold(
    agents: Any, generate: Callable[[GenerationRequest], Any], seed: int = 7, agent_name: str | None = None, **row: Any
) -> Any:
    row = {"raw_prompt": [{"role": "user", "content": "Q"}], "agent_name": agent_name, **row}
    return agents.hold(row, [1, 5, 6], generate, SamplingParams(max_tokens=400), seed)


async def slow(request: GenerationRequest) -> Completion:
    await asyncio.sleep(30)
    raise AssertionError("not withdrawn")


def test_results_are_those_of_the_controller(setup: AgentSetup, workers: Workers) -> None:
    """Tokens, masks, log-probs, versions, messages, counts and rewards of conversations with tool calls."""

    def policy(number: int) -> Scripted:
        return Scripted(f"Hm. {call('add', a=number, b=2)}", f"<tool_call>{number}", f"It is {number + 2}.")

    async def all_results(agents: Any) -> list[ConversationResult]:
        async with agents.running():
            return await all_of([hold(agents, policy(i), seed=i, agent_name="tool_agent") for i in range(40)])

    expected = asyncio.run(all_results(setup.make_agents()))
    assert expected[3].counts.tool_calls == 1 and expected[3].counts.malformed_calls == 1
    assert asyncio.run(all_results(workers.client)) == expected
    assert all(not link.held for link in workers.client._links)


def test_requests_of_a_conversation_run_at_once_and_can_be_withdrawn(workers: Workers) -> None:
    answered, withdrawn = asyncio.Event(), []
    request = GenerationRequest([1, 2], SamplingParams(max_tokens=4))

    async def generate(asked: GenerationRequest) -> Completion:
        if asked != request:
            answered.set()
            return Completion([5, 2], [-1.0, -1.0], "stop", [3, 3])
        try:
            await answered.wait()  # the other one is answered first
            return Completion([5], [-1.0], "length", [3])
        except asyncio.CancelledError:
            withdrawn.append(asked)
            raise

    async def run() -> None:
        done = await hold(workers.client, generate, what="twice", request=request)
        assert done.trajectory.response_ids == [5, 2] and done.trajectory.policy_versions == [3, 3]
        answered.clear()
        done = await hold(workers.client, generate, what="withdraw", request=request)
        assert done.trajectory.response_ids == [5, 2] and withdrawn == [request]

    asyncio.run(run())


@pytest.mark.parametrize(
    "what, kind, message", [("key", KeyError, "lost"), ("value", ValueError, "rows must"), ("exit", RuntimeError, "3")]
)
def test_an_exception_keeps_its_type_and_says_which_worker(
    what: str, kind: type[Exception], message: str, workers: Workers
) -> None:
    with pytest.raises(kind, match=message) as caught:
        asyncio.run(hold(workers.client, Scripted("x"), what=what))
    report = worker_report(caught.value)
    assert report is not None and report.startswith("raised in agent worker 0 of 2, pid ") and "plugins.py" in report
    assert not workers.client._links[0].held and not workers.client._links[1].held


def test_a_failure_of_the_policy_ends_the_conversation(workers: Workers) -> None:
    async def fail(request: GenerationRequest) -> Completion:
        raise WorkerDiedError("the engine is gone")

    with pytest.raises(WorkerDiedError, match="the engine is gone"):
        asyncio.run(hold(workers.client, fail, what="wait", released=[]))
    assert all(not process.worker._conversations for process in workers.processes)


def test_a_cancelled_conversation_has_released_its_tools(workers: Workers) -> None:
    released: list[int] = []

    async def run() -> None:
        calls = [asyncio.ensure_future(hold(workers.client, slow, what="wait", released=released)) for _ in range(5)]
        while sum(len(process.worker._answers) for process in workers.processes) < 5:
            await asyncio.sleep(0.01)
        for waiting in calls:
            waiting.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*calls, return_exceptions=True))
        assert len(released) == 5

    asyncio.run(run())
    # Cancelled before the worker has seen it.
    assert all(not process.worker._conversations for process in workers.processes)


def test_conversations_of_a_dead_worker_are_started_again(workers: Workers) -> None:
    asked: list[int] = []

    async def generate(request: GenerationRequest) -> Completion:
        asked.append(request.seed)
        if len(asked) <= 6:
            if len(asked) == 6:
                workers.processes[0].die()
            await asyncio.sleep(0.2)
        return Completion([5, 2], [-1.0, -1.0], "stop", [3, 3])

    async def run() -> list[ConversationResult]:
        names = ["single_turn_agent"] * 6
        return await all_of([hold(workers.client, generate, i, name) for i, name in enumerate(names)])

    results = asyncio.run(run())
    assert [result.trajectory.response_ids for result in results] == [[5, 2]] * 6
    assert len(workers.processes) == 3 and len(asked) == 9  # the three of the dead worker twice
    assert sorted(asked[6:]) == [0, 2, 4]


def test_a_conversation_that_kills_its_workers_ends_the_run(workers: Workers) -> None:
    async def generate(request: GenerationRequest) -> Completion:
        for process in workers.processes:
            if process.worker._conversations and not process.died.is_set():
                process.die()
        return await slow(request)

    with pytest.raises(WorkerDiedError, match="it died"):
        asyncio.run(asyncio.wait_for(hold(workers.client, generate, agent_name="single_turn_agent"), 60))
    assert len(workers.processes) == 2 + MAX_STARTS


def test_a_row_that_cannot_be_sent_is_named(setup: AgentSetup) -> None:
    class Pickling(InThisProcess):
        def send(self, messages: list[Any]) -> None:
            raise TypeError("cannot pickle '_thread.lock' object")

    client = AgentClient(setup.rollout, lambda number: Pickling(setup))
    with pytest.raises(ValueError, match=r"a row cannot be sent .*lock.*; set actor_rollout_ref.rollout.agent.num_wor"):
        asyncio.run(hold(client, Scripted("x"), what="wait"))
    client.close()


def test_a_conversation_that_cannot_be_sent_ends_without_its_worker(workers: Workers) -> None:
    async def both() -> Any:
        calls = [hold(workers.client, Scripted("x"), what="lock"), hold(workers.client, Scripted("y"), 8, "tool_agent")]
        return await asyncio.gather(*calls, return_exceptions=True)

    error, other = asyncio.run(both())
    assert isinstance(error, ValueError)
    assert str(error).startswith("the conversation cannot be sent to the controller (cannot pickle '_thread.lock'")
    assert other.new_messages[0]["content"] == "y" and len(workers.processes) == 2


def test_workers_that_cannot_be_set_up_raise_their_error(setup: AgentSetup) -> None:
    broken = replace(setup, rollout=replace(setup.rollout, multi_turn=MultiTurnConfig(tool_config_path="no.yaml")))
    began = time.monotonic()
    client = AgentClient(broken.rollout, lambda number: InThisProcess(broken))
    with pytest.raises(ValueError, match=r"tool_config_path=no\.yaml"):
        client.wait_ready()
    client.close()
    assert time.monotonic() - began < 5
