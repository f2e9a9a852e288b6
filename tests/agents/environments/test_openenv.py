"""Environments of OpenEnv: over a real server on loopback, and in this process."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.agents import Agents
from lockstep.agents.conversation import Conversation
from lockstep.protocol.generation import SamplingParams
from tests.agents.scripted import Scripted, converse, make_agents, sampled_texts

pytest.importorskip("openenv.core", reason="openenv is not installed (make test-environments)")

from openenv.core.env_server import create_fastapi_app

ENV = '''
import time
from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server import Action, Environment, Observation, State


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed_message: str = ""
    step_count: int = 0


class EchoEnvironment(Environment):
    """Repeats what it is told; three steps, a reward for each letter."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, greeting="Hello", **kwargs):
        if greeting == "raise":
            raise RuntimeError("no reset")
        self._state = State(step_count=0)
        return EchoObservation(echoed_message=f"{greeting} {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        message = action.message if hasattr(action, "message") else action["message"]
        if message == "raise":
            raise RuntimeError("no step")
        if message == "hang":
            time.sleep(3)
        done = self._state.step_count == 3 or message == "end"
        return EchoObservation(
            echoed_message=message.upper(), step_count=self._state.step_count, reward=float(len(message)), done=done
        )

    @property
    def state(self):
        return self._state


class EchoClient(EnvClient):
    def _step_payload(self, action):
        return {"message": action.message}

    def _parse_result(self, payload):
        observation = EchoObservation(**payload["observation"])
        return StepResult(observation=observation, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload):
        return State(**payload)


def shout(observation):
    return observation.echoed_message + "!"


def nothing(observation):
    return 3
'''


@pytest.fixture(scope="module")
def env_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("openenv") / "echo_env_of_test.py"
    file.write_text(ENV)
    return file


@pytest.fixture(scope="module")
def server(env_file: Path) -> Iterator[str]:
    import uvicorn

    from lockstep.registry import load_module

    module = load_module(str(env_file))
    app = create_fastapi_app(module.EchoEnvironment, module.EchoAction, module.EchoObservation, max_concurrent_envs=4)
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=running.run, args=([listener],), daemon=True)
    thread.start()
    while not running.started and thread.is_alive():
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(20)
    listener.close()
    assert not thread.is_alive()


def agents_with(tmp_path: Path, options: str, **multi_turn: Any) -> Agents:
    file = tmp_path / "loops.yaml"
    file.write_text(f"- {{name: echo, _target_: lockstep.agents.environments.OpenEnvAgent, {options}}}\n")
    return make_agents(loops=str(file), **multi_turn)


def test_over_the_server(server: str, tmp_path: Path) -> None:
    agents = agents_with(tmp_path, f"base_url: '{server}', reset_kwargs: {{greeting: Hi}}")
    policy = Scripted("a", "bb", "ccc")
    done = converse(agents, policy, "echo", index=5)
    assert sampled_texts(done) == ["a<|im_end|>", "bb<|im_end|>", "ccc<|im_end|>"]
    assert [m["content"] for m in done.messages] == ["Q\n\nHi 5", "a", "A", "bb", "BB", "ccc"]
    assert done.turn_scores == [1.0, 2.0, 3.0] and done.reward_scores == {"reward": 6.0}
    assert (done.finish_reason, done.counts.environment_errors) == ("stop", 0)
    for request in policy.requests:
        assert request.prompt_ids == done.trajectory.ids[: len(request.prompt_ids)]


def test_rows_choose_their_server_and_seed(server: str, tmp_path: Path) -> None:
    agents = agents_with(tmp_path, f"base_url: ['http://127.0.0.1:9', '{server}']")
    row = {"extra_info": {"env_kwargs": {"base_url": server}, "reset_kwargs": {"seed": 9}}}
    done = converse(agents, Scripted("end"), "echo", **row)
    assert done.messages[0]["content"] == "Q\n\nHello 9" and done.turn_scores == [3.0]


@pytest.mark.parametrize("place", ["client", "env_class"])
def test_typed_classes_and_functions(server: str, env_file: Path, tmp_path: Path, place: str) -> None:
    where = (
        f"base_url: '{server}', client: '{env_file}:EchoClient'"
        if place == "client"
        else f"env_class: '{env_file}:EchoEnvironment'"
    )
    agents = agents_with(tmp_path, f"{where}, action: '{env_file}:EchoAction', observation: '{env_file}:shout'")
    done = converse(agents, Scripted("a", "end"), "echo")
    assert [m["content"] for m in done.messages] == ["Q\n\nHello None!", "a", "A!", "end"]
    assert done.turn_scores == [1.0, 3.0]


def test_episodes_wait_for_a_free_place(server: str, tmp_path: Path) -> None:
    """The server has 4 places."""
    agents = agents_with(tmp_path, f"base_url: '{server}', max_concurrent: 4")
    row = {"raw_prompt": [{"role": "user", "content": "Q"}], "agent_name": "echo"}
    ids = agents.renderer.ids(row["raw_prompt"])  # type: ignore[arg-type]

    async def run() -> list[Conversation]:
        async with agents.running():
            return await asyncio.gather(
                *(agents.converse(row, ids, Scripted("a", "end"), SamplingParams(max_tokens=50), n) for n in range(12))
            )

    assert [done.reward_scores for done in asyncio.run(run())] == [{"reward": 4.0}] * 12


@pytest.mark.parametrize(
    "texts, options, problem",
    [
        (["raise"], "", "no step"),
        (["hang"], "", "took longer than 1 s"),
        ([], "reset_kwargs: {greeting: raise}", "no reset"),
        ([], "observation: 'FILE:nothing'", "not text"),
        (["a"], "action: 'FILE:shout'", "has no attribute 'echoed_message'"),
    ],
)
def test_a_failure_costs_its_own_conversation(
    server: str,
    env_file: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    texts: list[str],
    options: str,
    problem: str,
) -> None:
    agents = agents_with(tmp_path, f"base_url: '{server}', {options}".replace("FILE", str(env_file)), tool_timeout_s=1)
    done = converse(agents, Scripted(*texts), "echo")
    assert done.counts.environment_errors == 1 and done.reward_scores == {} and problem in caplog.text
    assert sum(m["role"] == "assistant" for m in done.new_messages) == len(texts)


def test_a_server_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = converse(agents_with(tmp_path, "base_url: 'http://127.0.0.1:9'"), Scripted(), "echo")
    assert done.counts.environment_errors == 1 and "Failed to connect to ws://127.0.0.1:9/ws" in caplog.text


def test_settings_are_checked_before_training(env_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the address of the environment's server"):
        make_agents().check_row({"agent_name": "openenv_agent"})
    for options, problem in [
        ("base_url: x, max_concurrent: 0", "max_concurrent=0 must be at least 1"),
        ("base_url: x, action: no_module:name", "action=no_module:name"),
        (f"base_url: x, client: '{env_file}:shout'", "client=.*must be a subclass"),
        (f"env_class: '{env_file}:EchoAction'", "has no `reset` and `step`"),
        ("base_url: x, urls: y", "unexpected keyword argument 'urls'"),
    ]:
        with pytest.raises(ValueError, match=problem):
            agents_with(tmp_path, options).check_row({"agent_name": "echo"})
