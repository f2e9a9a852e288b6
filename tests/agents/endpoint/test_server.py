"""Access, sessions, wrong requests and clients that go away."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from lockstep.agents.endpoint.server import Endpoint, ServerSettings
from lockstep.utils.local_http import is_loopback
from tests.agents.endpoint.service import ScriptedPolicy, serving

QUESTION: Any = [{"role": "user", "content": "1+2?"}]
BODY = {"model": "policy", "messages": QUESTION}
CHAT = "/v1/chat/completions"


def send(
    endpoint: Any, path: str, body: Any = BODY, headers: dict[str, str] | None = None, method: str = "POST"
) -> tuple[int, Any]:
    """The status and the document of a request; body: an object, or raw bytes."""
    connection = http.client.HTTPConnection(endpoint.url.removeprefix("http://"), timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data if method == "POST" else None, headers or {})
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_other_addresses_need_a_token() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost") and not is_loopback("0.0.0.0")
    with pytest.raises(ValueError, match=r"host 0\.0\.0\.0 is not loopback.*set a token"):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", token="secret").token == "secret"
    with pytest.raises(ValueError, match="printable ASCII"):
        ServerSettings(token=" ")


def test_token() -> None:
    policy = ScriptedPolicy(["a", "b"])
    with serving(policy, server={"token": "secret", "open_sessions": True}) as endpoint:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"x-api-key": "wrong"},
            {"authorization": "Basic secret"},
        ):
            status, answer = send(endpoint, CHAT, headers=headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        status, answer = send(endpoint, "/v1/messages", headers={"x-api-key": "wrong"})
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert policy.requests == []
        assert send(endpoint, CHAT, headers={"authorization": "Bearer secret"})[0] == 200
        assert send(endpoint, CHAT, headers={"x-api-key": "secret", "host": "example.org"})[0] == 200
        assert send(endpoint, "/health", method="GET") == (200, {"status": "ok"})
        assert send(endpoint, "/v1/models", method="GET")[0] == 401


def test_wrong_requests_and_access_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ScriptedPolicy(), server={"open_sessions": True}) as endpoint:

        def status(path: str, body: Any = BODY, **headers: str) -> tuple[int, str]:
            code, answer = send(endpoint, path, body, headers)
            return code, answer["error"]["message"]

        assert status(CHAT, b"{not JSON")[0] == 400 and "not valid JSON" in status(CHAT, b"{not JSON")[1]
        assert status(CHAT, b"\xff")[0] == 400
        assert status(CHAT, b"[" * 200_000)[0] == 400
        assert status(CHAT, [1]) == (400, "the body must be a JSON object")
        assert status(CHAT, {"messages": QUESTION}) == (400, "model: Field required")
        assert status(CHAT, BODY | {"model": "gpt-9"})[0] == 404
        long = BODY | {"messages": [{"role": "user", "content": "x" * 2000}]}
        code, answer = send(endpoint, CHAT, long)
        assert (code, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "2019 tokens, but the model's context has 2000" in answer["error"]["message"]
        assert status("/v1/completions", {"model": "policy", "prompt": [99999]})[0] == 400
        assert status("/v1/completions", {"model": "policy", "prompt": ""})[0] == 400
        assert status("/v1/nothing")[0] == 404
        assert send(endpoint, CHAT, method="GET")[0] == 405
        assert status("/s/a%20b/v1/chat/completions")[0] == 400
        # pages in a browser, also after DNS rebinding
        for host in (
            "example.org:80",
            "evil.com:99999",
            "a@b",
            "a@127.0.0.1",
            "",
            "127.0.0.1.evil.com",
            "[::1",
            "localhost:8x",
        ):
            assert status(CHAT, host=host)[0] == 403, host
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000"):
            assert send(endpoint, "/v1/models", headers={"host": host}, method="GET")[0] == 200, host
        assert status(CHAT, origin="http://example.org")[0] == 403
        monkeypatch.setattr("lockstep.agents.endpoint.server.MAX_BODY_BYTES", 10)
        assert status(CHAT)[0] == 413


def test_sessions_that_were_not_opened_are_refused() -> None:
    policy = ScriptedPolicy(["a"])
    with serving(policy) as endpoint:
        assert send(endpoint, CHAT)[0] == 404
        assert send(endpoint, f"/s/one{CHAT}")[0] == 404
        endpoint.open_session("one")
        with pytest.raises(ValueError, match="exists already"):
            endpoint.open_session("one")
        with pytest.raises(ValueError, match="must be 1 to 128 letters"):
            endpoint.open_session("a/b")
        assert send(endpoint, f"/s/one{CHAT}")[0] == 200
        (turn,) = send(endpoint, "/s/one/turns", method="GET")[1]["turns"]
        assert turn["stop_reason"] == "stop" and len(turn["token_ids"]) == len(turn["log_probs"]) == 2


def test_a_session_can_have_its_own_generate() -> None:
    policy, own = ScriptedPolicy(), ScriptedPolicy(["own"])
    with serving(policy) as endpoint:
        endpoint.open_session("one", own.generate)
        assert send(endpoint, f"/s/one{CHAT}")[1]["choices"][0]["message"]["content"] == "own"


def test_the_oldest_sessions_are_dropped() -> None:
    policy = ScriptedPolicy(["x"] * 5)
    with serving(policy, server={"open_sessions": True, "max_sessions": 2}) as endpoint:
        for name in ("a", "b", "a", "c"):
            assert send(endpoint, f"/s/{name}{CHAT}")[0] == 200
        assert list(endpoint._sessions) == ["a", "c"]
        assert send(endpoint, CHAT)[0] == 200
        assert list(endpoint._sessions) == ["a", "c"]


def test_seeds() -> None:
    policy = ScriptedPolicy(["x"] * 4)
    with serving(policy, server={"open_sessions": True}, seed=7) as endpoint:
        for body in (BODY, BODY, BODY | {"seed": 3}, BODY | {"seed": 3, "model": "policy"}):
            assert send(endpoint, CHAT, body)[0] == 200
    seeds = [request.seed for request in policy.requests]
    assert len(set(seeds)) == 3 and seeds[2] == seeds[3] and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(stream: bool) -> None:
    policy = ScriptedPolicy(["one two three four five six seven"])
    never = asyncio.Event()
    policy.gate = lambda number: never if number == int(stream) else None
    with serving(policy) as endpoint:
        client = openai.OpenAI(base_url=endpoint.open_session("one"), api_key="none", max_retries=0)
        if stream:
            chunks: Any = client.chat.completions.create(model="policy", messages=QUESTION, stream=True)
            text = ""
            while not text:
                text += next(chunks).choices[0].delta.content or ""
            chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.3).chat.completions.create(model="policy", messages=QUESTION)
        client.close()
        wait_until(lambda: policy.num_cancelled == 1 and endpoint.counters.num_aborted == 1)
        turns = endpoint.close_session("one").turns
        assert policy.num_running == 0
        if stream:  # it received the first piece
            assert (
                turns[0].completion.stop_reason == "abort"
                and policy.text(turns[0].token_ids) == text == "one two three fo"
            )
        else:
            assert turns == []


def test_a_client_that_goes_away_while_it_sends(caplog: pytest.LogCaptureFixture) -> None:
    with serving(ScriptedPolicy(), server={"open_sessions": True}) as endpoint:
        address, port = endpoint.url.removeprefix("http://").split(":")
        with socket.create_connection((address, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        wait_until(lambda: endpoint.counters.num_aborted == 1)
    assert "a request failed" not in caplog.text


def test_a_failing_policy_is_an_error_of_the_server() -> None:
    with serving(ScriptedPolicy([])) as endpoint:
        client = openai.OpenAI(base_url=endpoint.open_session("one"), api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="the server failed: IndexError"):
            client.chat.completions.create(model="policy", messages=QUESTION)
        with client, pytest.raises(openai.APIError, match="the server failed: IndexError"):
            list(client.chat.completions.create(model="policy", messages=QUESTION, stream=True, n=2))
        assert endpoint.counters.num_failed == 2


def test_a_port_that_is_taken() -> None:
    with serving(ScriptedPolicy()) as endpoint:
        port = int(endpoint.url.rpartition(":")[2])
        other = Endpoint(endpoint.generate, endpoint.renderer, endpoint.answers, ServerSettings(port=port))

        async def run() -> None:
            async with other.running():
                pass

        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            asyncio.run(run())
