"""`lockstep serve` with a tiny model: tokens and log-probs, many clients at once, clients that go away, signals, errors."""

import asyncio
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from transformers import AutoModelForCausalLM

from lockstep import cli
from lockstep.serve import Service, _parser
from tests.tiny import save_tiny_model

QUESTION = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("serve") / "model")


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    """The service in this process, and a client of the session `one`."""
    async with (
        service.client.running(),
        service.endpoint.running(),
        httpx2.AsyncClient(base_url=f"{service.endpoint.url}/s/one/v1", timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def service(model: Path) -> Service:
    return Service(_parser().parse_args([str(model), "--port", "0", "--name", "tiny", "--device", "cpu"]))


async def ask(client: httpx2.AsyncClient, messages: Any = QUESTION, **more: Any) -> Any:
    body = {"model": "tiny", "messages": messages, "max_tokens": 40} | more
    answer = await client.post("/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_recorded_log_probs_are_those_of_transformers(service: Service, model: Path) -> None:
    async def talk() -> list[dict[str, Any]]:
        async with running(service) as client:
            first = (await ask(client))["choices"][0]["message"]
            more = [*QUESTION, first, {"role": "user", "content": "Sure?"}]
            async with client.stream(
                "POST", "/chat/completions", json={"model": "tiny", "messages": more, "max_tokens": 40, "stream": True}
            ) as stream:
                assert len([line async for line in stream.aiter_lines() if line.startswith("data: ")]) > 4
            turns: list[dict[str, Any]] = (await client.get(f"{service.endpoint.url}/s/one/turns")).json()["turns"]
            return turns

    one, two = asyncio.run(talk())
    assert two["parent"] == 0
    done = len(one["prompt_ids"]) + len(one["token_ids"])
    assert two["prompt_ids"][:done] == one["prompt_ids"] + one["token_ids"]
    ids = two["prompt_ids"] + two["token_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for turn in (one, two):
        start = len(turn["prompt_ids"])
        got = torch.tensor(turn["log_probs"])
        torch.testing.assert_close(got, expected[start - 1 : start - 1 + len(got)], atol=1e-4, rtol=0)


def test_a_stream_has_the_tokens_of_the_whole_answer(service: Service) -> None:
    async def both() -> list[Any]:
        async with running(service) as client:
            options = {"seed": 5, "extra": 1, "return_token_ids": True, "max_tokens": 60}
            whole = (await ask(client, **options))["choices"][0]
            body = {"model": "tiny", "messages": QUESTION, "stream": True, **options}
            async with client.stream("POST", "/chat/completions", json=body) as stream:
                lines = [line.removeprefix("data: ") async for line in stream.aiter_lines() if line]
            chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
            text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
            ids = [token for chunk in chunks for token in chunk.get("token_ids", [])]
            return [whole["message"]["content"], whole["token_ids"], text, ids]

    text, ids, streamed_text, streamed_ids = asyncio.run(both())
    assert (text, ids) == (streamed_text, streamed_ids) and len(ids) > 16


def test_requests_of_clients_that_go_away_leave_the_engine(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = service.client._group.workers[0].rollout
    most = 0
    step = engine.step

    def waiting() -> Any:
        """No request ends before all are there."""
        time.sleep(0 if most else 0.001)
        return step() if most else {}

    monkeypatch.setattr(engine, "step", waiting)

    async def leave() -> None:
        nonlocal most
        async with running(service) as client:
            tasks = [asyncio.create_task(ask(client, max_tokens=200, n=2)) for _ in range(3)]
            while len(engine.unfinished()) < 6:
                await asyncio.sleep(0.001)
            most = len(engine.unfinished())
            for task in tasks:
                task.cancel()
            while engine.unfinished():
                await asyncio.sleep(0.001)
            assert (await ask(client, max_tokens=3))["usage"]["completion_tokens"] <= 3

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert most == 6 and service.endpoint.counters.num_aborted == 3


def test_a_turn_goes_on_with_new_weights(service: Service) -> None:
    """As in asynchronous training: generation is paused, the policy is updated, unfinished requests go on."""
    engine = service.client._group.workers[0].rollout

    async def update() -> list[Any]:
        async with running(service) as client:
            service.endpoint._sessions.clear()
            answers = asyncio.create_task(ask(client, max_tokens=200, n=4))
            while not engine.unfinished():
                await asyncio.sleep(0.001)
            await service.client.pause()
            engine.policy_version += 1
            await service.client.resume()
            assert len((await answers)["choices"]) == 4
        return [turn.completion.policy_versions for turn in service.endpoint.close_session("one").turns]

    versions = asyncio.run(update())
    assert len(versions) == 4 and all(list(found) == sorted(found) for found in versions)
    assert any(set(found) == {0, 1} for found in versions)
    engine.policy_version = 0


def memory_used() -> float:
    """In MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_500_requests_at_once(service: Service) -> None:
    async def one(number: int) -> tuple[int, int]:
        # plain sockets: httpx2 needs seconds for this many connections
        reader, writer = await asyncio.open_connection("127.0.0.1", int(service.endpoint.url.rpartition(":")[2]))
        body = json.dumps({"model": "tiny", "prompt": f"{number}+1=", "max_tokens": 6, "ignored": "x" * 2000})
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
        writer.write(f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        head, _, text = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200 OK"), head + text
        usage = json.loads(text)["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    async def wave() -> float:
        async with running(service):
            found = await asyncio.gather(*(one(number) for number in range(500)))
        assert [prompt for prompt, _ in found] == [len(f"{number}+1=") for number in range(500)]
        assert all(1 <= length <= 6 for _, length in found)
        return memory_used()

    first, second = (asyncio.run(wave()) for _ in range(2))
    assert second - first < 32


@pytest.mark.parametrize("signals", [1, 2])
def test_the_first_signal_lets_requests_end_and_the_second_does_not(
    service: Service,
    signals: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    advance = service.client._advance

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.1)  # so that the signals come before the answer ends
        return advance(*arguments)

    monkeypatch.setattr(service.client, "_advance", slowly)
    service._stopping = asyncio.Event()
    service.endpoint.url = ""

    async def run() -> tuple[int, list[str]]:
        server = asyncio.create_task(service.run())
        while not service.endpoint.url:
            await asyncio.sleep(0.005)
        body = {"model": "tiny", "prompt": "1", "max_tokens": 250, "stream": True, "seed": 4}
        lines: list[str] = []
        with suppress(httpx2.RemoteProtocolError):
            async with (
                httpx2.AsyncClient(timeout=60) as client,
                client.stream("POST", f"{service.endpoint.url}/v1/completions", json=body) as stream,
            ):
                async for line in stream.aiter_lines():
                    if not lines:
                        for _ in range(signals):
                            os.kill(os.getpid(), signal.SIGINT)
                    lines += [line] if line else []
        return await server, lines

    code, lines = asyncio.run(run())
    assert code == 0 and "serving tiny at http://127.0.0.1:" in capsys.readouterr().out
    assert (lines[-1] == "data: [DONE]") == (signals == 1) and len(lines) >= 1
    assert "press Ctrl-C again" in caplog.text and "Traceback" not in caplog.text


def test_a_failure_of_the_engine_ends_the_server(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(_parser().parse_args([str(model), "--port", "0", "--device", "cpu"]))

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(service.client, "_advance", broken)

    async def run() -> int:
        server = asyncio.create_task(service.run())
        while not service.endpoint.url:
            await asyncio.sleep(0.01)
        async with httpx2.AsyncClient(timeout=60) as client:
            body = {"model": "model", "prompt": "1", "max_tokens": 4}
            answer = await client.post(f"{service.endpoint.url}/v1/completions", json=body)
        assert answer.status_code == 500 and "no more memory" in answer.json()["error"]["message"]
        return await server

    assert asyncio.run(run()) == 1
    assert "generation failed: RuntimeError: no more memory" in capsys.readouterr().err


def test_a_request_that_fails_alone_does_not_end_the_server(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = service.client._group.workers[0].rollout
    service._stopping = asyncio.Event()

    def refuse(*arguments: Any) -> None:
        raise ValueError("this request is refused")

    async def run() -> list[Any]:
        async with running(service) as client:
            with monkeypatch.context() as planted:
                planted.setattr(engine, "add", refuse)
                body = {"model": "tiny", "prompt": "1", "max_tokens": 4}
                failed = await client.post("/completions", json=body)
            return [failed, await client.post("/completions", json=body)]

    failed, answer = asyncio.run(run())
    assert failed.status_code == 500 and "this request is refused" in failed.json()["error"]["message"]
    assert answer.status_code == 200 and not service._stopping.is_set()


def test_a_request_that_breaks_the_engine_is_answered_with_its_error_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The requests that the engine had with it are tried again."""
    engine = service.client._group.workers[0].rollout
    service._stopping = asyncio.Event()
    step = engine.step

    def broken(*arguments: Any) -> Any:
        if any(sequence.request.sampling.top_k == 77 for sequence in engine._sequences.values()):
            raise IndexError("index 7 is out of bounds")
        return step()

    monkeypatch.setattr(engine, "step", broken)

    async def run() -> list[Any]:
        async with running(service) as client:
            bodies: list[dict[str, Any]] = [{"model": "tiny", "prompt": f"{i}", "max_tokens": 40} for i in range(6)]
            bodies[3]["top_k"] = 77
            answers = await asyncio.gather(*(client.post("/completions", json=body) for body in bodies))
            return [*answers, await client.post("/completions", json=bodies[0])]

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200, 200, 200, 500, 200, 200, 200]
    assert "index 7 is out of bounds" in answers[3].json()["error"]["message"]
    assert not service._stopping.is_set() and "the engine failed and is started again" in caplog.text


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """Of a service with short answers, which runs in a thread."""
    options = [str(model), "--port", "0", "--name", "tiny", "--device", "cpu", "--max-model-len", "24"]
    service = Service(_parser().parse_args(options))
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def run() -> None:
        async with service.client.running(), service.endpoint.running():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(60)
    yield service.endpoint.url
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    assert service.client.failure is None
    loop.close()


def post(url: str, body: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", body.encode())
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


NUMBER = st.one_of(
    st.floats(),
    st.sampled_from([0.0, 1e-300, 1e-40, 1e-10, 1e-5, 0.7, 1.0, 1e6, 1e39, -0.0, 5e-324]),
    st.sampled_from([-1, 0, 1, 5, 2**31, 2**63, 2**64, -(2**70), 10**400]),
    st.none(),
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "n"), NUMBER),
        "logprobs": st.sampled_from([0, 1, 5, True, None, "x"]),
        "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=2), max_size=2)),
        "stream": st.sampled_from([False, True, 7]),
    },
)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(fields=FIELDS, prompt=st.one_of(st.just("1+1="), st.lists(NUMBER, min_size=1, max_size=3)))
def test_no_request_ends_the_server(url: str, fields: dict[str, Any], prompt: Any) -> None:
    """Whatever numbers it has, it is answered or refused."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3} | fields
    status, text = post(url, json.dumps(body))
    assert status in (200, 400), (body, text)


@pytest.mark.parametrize("temperature", ["1e-40", "1e-300", "5e-324", "0", "1e-6"])
def test_tiny_temperatures_are_greedy(url: str, temperature: str) -> None:
    content = '{"model": "tiny", "prompt": "1+1=", "max_tokens": 8, "temperature": %s, "logprobs": 0}'
    greedy, tiny = (json.loads(post(url, content % value)[1])["choices"][0] for value in ("0", temperature))
    assert (tiny["text"], tiny["logprobs"]) == (greedy["text"], greedy["logprobs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all"], "MODEL=nowhere/at/all: no such folder"),
        (["{model}/.."], "is neither a model, a checkpoint nor a run"),
        (["{model}", "--host", "0.0.0.0"], "host 0.0.0.0 is not loopback"),
        (["{model}", "--max-model-len", "1000"], "--max-model-len 1000: must be 2 to 256"),
        (["{model}", "--tool-format", "hermess"], "--tool-format hermess: no such tool parser. Did you mean 'hermes'?"),
        (["{model}", "--top-p", "2"], "--top-p 2.0: must lie in (0, 1]"),
        (["{model}", "--temperature", "1e9"], "--temperature 1000000000.0: must be at most 1e+06"),
        (["{model}", "--temperature", "nan"], "--temperature nan: must be 0 (greedy) or more"),
        (["{model}", "--temperature", "-1"], "--temperature -1.0: must be 0 (greedy) or more"),
        (["{model}", "--port", "99999"], "--port 99999: must be 0 to 65535"),
        (["{model}", "--max-num-seqs", "0"], "--max-num-seqs 0: must be at least 1"),
        (["{model}", "--max-tokens", "0"], "--max-tokens 0: must be at least 1"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_SERVE_TOKEN", raising=False)
    assert cli.main(["serve", *(word.format(model=model) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("lockstep serve: ") and error.count("\n") == 1


def test_a_port_that_is_taken(
    model: Path, service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported before the model is loaded."""
    monkeypatch.setattr(Service, "_load", None)

    async def run() -> int:
        async with service.endpoint.running():
            port = service.endpoint.url.rpartition(":")[2]
            return await asyncio.to_thread(cli.main, ["serve", str(model), "--port", port, "--device", "cpu"])

    assert asyncio.run(run()) == 2
    assert "Address already in use" in capsys.readouterr().err
