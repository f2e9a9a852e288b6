"""Single requests to the rollout's workers: in any order, aborted, and resumed with other weights."""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from lockstep.single_controller import ClassWithInitArgs, ResourcePool
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.rollout_client import RolloutClient
from tests.engines.rollout.fake_server import FakeServer, fake_servers
from tests.tiny import save_tiny_model, write_rows

pytestmark = pytest.mark.first

VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]


@pytest.fixture(scope="module", params=["embedded", "hf", pytest.param("vllm", marks=VLLM)])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("client")
    save_tiny_model(folder / "model", hidden_size=64, num_attention_heads=2)  # a head size of vLLM's CPU kernels
    write_rows(folder / "train.parquet")
    overrides = [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={folder}/train.parquet",
        f"actor_rollout_ref.rollout.name={request.param}",
        "actor_rollout_ref.rollout.max_num_seqs=4",
        "actor_rollout_ref.rollout.load_format=auto",
        "data.max_prompt_length=16",
        "data.max_response_length=48",
        "trainer.device=cpu",
    ]
    return worker_group(overrides, "actor_rollout")


def worker_group(overrides: list[str], role: str) -> Any:
    config = load_config(PPOConfig, overrides).actor_rollout_ref
    init = ClassWithInitArgs(ActorRolloutRefWorker, config=config, role=role, device="cpu")
    group: Any = LocalWorkerGroup(ResourcePool([1]), init)
    group.init_model()
    return group


def requests(count: int = 6, max_tokens: int = 40, temperature: float = 1.0) -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=temperature)
    return [GenerationRequest([10 + i, 20, 30][: 1 + i % 3], sampling, seed=i) for i in range(count)]


def engine_of(group: Any) -> Any:
    return group.workers[0].rollout


def generated(group: Any, wanted: list[GenerationRequest]) -> list[Completion]:
    """By the batch path."""
    completions: list[Completion] = group.workers[0]._complete(wanted)
    return completions


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.stop_reason for c in found] == [c.stop_reason for c in expected]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-4, rtol=0)
        assert len(one.policy_versions) == len(one.token_ids)


def test_requests_give_the_completions_of_a_batch(group: Any) -> None:
    client = RolloutClient(group)

    async def ask() -> list[Completion]:
        async with client.running():
            late = [client.generate(request, key="group") for request in requests()]
            return list(await asyncio.gather(*late))

    assert_same(asyncio.run(ask()), generated(group, requests()))
    assert_same(asyncio.run(ask()), generated(group, requests()))  # in a new event loop
    assert not engine_of(group).unfinished()


def test_paused_requests_go_on_with_the_weights_of_then(group: Any) -> None:
    client, engine = RolloutClient(group), engine_of(group)
    parameter = group.workers[0].actor.model.transformer.model.norm.weight
    wanted = requests(temperature=1.0 if engine.info.shares_weights else 0.0)  # vLLM's random streams do not go on

    async def ask(change: bool) -> list[Completion]:
        async with client.running():
            tasks = [asyncio.create_task(client.generate(request)) for request in wanted]
            await asyncio.sleep(0)
            for _ in range(3):
                await asyncio.sleep(0.01)
                await client.pause()
                if change:
                    engine.policy_version += 1
                    with torch.no_grad():
                        parameter.mul_(-1.0)
                    change = False
                await client.resume()
            return list(await asyncio.gather(*tasks))

    expected = generated(group, wanted)
    assert_same(asyncio.run(ask(change=False)), expected)
    changed = asyncio.run(ask(change=True))
    versions = {version for completion in changed for version in completion.policy_versions}
    assert engine.policy_version in versions
    for found, before in zip(changed, expected):
        first = [version < engine.policy_version for version in found.policy_versions]
        assert first == sorted(first, reverse=True)
        assert found.token_ids[: sum(first)] == before.token_ids[: sum(first)]
        assert len(found.token_ids) == 40


def test_cancelled_request_leaves_the_others_alone(group: Any) -> None:
    client = RolloutClient(group)

    async def ask() -> list[Completion]:
        async with client.running():
            tasks = [asyncio.create_task(client.generate(request)) for request in requests()]
            await asyncio.sleep(0.005)
            tasks[1].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(results.pop(1), asyncio.CancelledError)
            return results  # type: ignore[return-value]

    expected = generated(group, requests())
    assert_same(asyncio.run(ask()), [expected[0], *expected[2:]])
    assert not engine_of(group).unfinished()


def test_unfinished_requests_are_cancelled_at_the_end(group: Any) -> None:
    client = RolloutClient(group)

    async def leave() -> None:
        async with client.running():
            task = asyncio.create_task(client.generate(requests()[0]))
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert_same(generated(group, requests()), generated(group, requests()))


def test_failure_reaches_every_caller(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = RolloutClient(group)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    async def ask() -> list[Any]:
        async with client.running():
            monkeypatch.setattr(engine_of(group), "step", fail)
            tasks = [client.generate(request) for request in requests()]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(RuntimeError, match="the device is gone"):
                await client.generate(requests()[0])
            return results

    assert {str(error) for error in asyncio.run(ask())} == {"the device is gone"}
    monkeypatch.undo()
    group.end_generation()


def test_request_that_cannot_be_served_fails_alone(group: Any) -> None:
    client = RolloutClient(group)
    wrong = [GenerationRequest([1] * 30, SamplingParams(max_tokens=40)), GenerationRequest([], SamplingParams())]

    async def ask() -> list[Any]:
        async with client.running():
            tasks = [client.generate(request) for request in [*requests(), *wrong]]
            results = list(await asyncio.gather(*tasks, return_exceptions=True))
            results.append(await client.generate(requests()[0]))
            return results

    *found, too_long, empty, again = asyncio.run(ask())
    expected = generated(group, requests())
    assert_same([*found, again], [*expected, expected[0]])
    assert "30 prompt tokens + max_tokens 40 = 70 exceed max_model_len=64" in str(too_long)
    assert "prompt has no tokens" in str(empty)
    assert client.failure is None


def client_of(server: FakeServer, folder: Path) -> RolloutClient:
    save_tiny_model(folder / "model")
    overrides = [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={write_rows(folder / 'train.parquet')}",
        "actor_rollout_ref.rollout.name=server",
        f"actor_rollout_ref.rollout.server.urls=[{server.url}]",
        "data.max_prompt_length=16",
        "data.max_response_length=48",
        "trainer.device=cpu",
    ]
    return RolloutClient(worker_group(overrides, "rollout"))


def test_wrong_answer_of_a_server_is_of_one_request(tmp_path: Path) -> None:
    with fake_servers("vllm") as (server,):
        client = client_of(server, tmp_path)
        server.state.faults.append("short")

        async def ask() -> list[Any]:
            async with client.running():
                return await asyncio.gather(*map(client.generate, requests()), return_exceptions=True)

        failed = [found for found in asyncio.run(ask()) if isinstance(found, Exception)]
        assert len(failed) == 1 and "40 were asked for" in str(failed[0])
        assert client.failure is None


def test_requests_that_finish_during_a_pause_are_not_continued(tmp_path: Path) -> None:
    """Servers go on while nobody asks them."""
    with fake_servers("vllm", delay_s=0.002) as (server,):
        client = client_of(server, tmp_path)
        wanted = [*requests(4, max_tokens=4), *requests(4, max_tokens=40)]

        async def ask() -> list[Completion]:
            async with client.running():
                tasks = [asyncio.create_task(client.generate(request)) for request in wanted]
                for _ in range(4):
                    await asyncio.sleep(0.015)
                    await client.pause()
                    await client.resume()
                return list(await asyncio.gather(*tasks))

        found = asyncio.run(ask())
        assert [len(c.token_ids) for c in found] == [4] * 4 + [40] * 4
        assert all(c.stop_reason == "length" and len(c.log_probs) == len(c.token_ids) for c in found)
