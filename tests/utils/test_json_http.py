"""Answers of HTTP servers: their size is limited, also after decompression."""

import asyncio
import functools
import gzip
import json
from typing import Any

import httpx2
import pytest

from lockstep.utils import json_http
from lockstep.utils.json_http import AnswerTooLargeError, HttpError, post_json, request_limited
from tests.judge_server import Answer, serve


def request(response: httpx2.Response, max_bytes: int) -> httpx2.Response:
    async def run() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(lambda _: response)) as client:
            return await request_limited(client, "POST", "http://host/path", json={}, max_bytes=max_bytes)

    return asyncio.run(run())


def test_answers_up_to_the_limit_are_read() -> None:
    body = json.dumps({"text": "x" * 100}).encode()
    found = request(httpx2.Response(429, content=body, headers={"retry-after": "3"}), len(body))
    assert (found.status_code, found.json()["text"], found.headers["retry-after"]) == (429, "x" * 100, "3")
    with pytest.raises(AnswerTooLargeError, match=r"http://host/path: the answer is larger than .* MiB"):
        request(httpx2.Response(200, content=body), len(body) - 1)


def test_the_limit_holds_after_decompression() -> None:
    packed = gzip.compress(json.dumps("x" * 10**6).encode())
    headers = {"content-encoding": "gzip"}
    assert request(httpx2.Response(200, content=packed, headers=headers), 2 * 10**6).json() == "x" * 10**6
    with pytest.raises(AnswerTooLargeError):
        request(httpx2.Response(200, content=packed, headers=headers), 10**5)


def test_clients_of_post_json_get_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search tool, the sandbox of a server and the simulated user."""
    monkeypatch.setattr(json_http, "request_limited", functools.partial(request_limited, max_bytes=1000))

    async def ask(url: str) -> Any:
        return await post_json(url, {}, timeout_s=20)

    with serve(lambda body, _: Answer("x" * 2000)) as server:
        with pytest.raises(HttpError, match="larger than"):
            asyncio.run(ask(server.url))
        assert len(server.requests) == 1, "it is not asked again"
