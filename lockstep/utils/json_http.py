"""A JSON request with a deadline and a limit on the answer's size: failures that may pass are retried with growing pauses."""

import asyncio
import functools
import os
import ssl
from collections.abc import Mapping
from typing import Any

import httpx2

RETRIED = {408, 425, 429, 500, 502, 503, 504}
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
MAX_ANSWER_BYTES = 2**27
"""A program's output of 64 MiB in base64, with room to spare."""


class HttpError(ConnectionError):
    """No usable answer. The message is one line with the URL."""


class AnswerTooLargeError(HttpError):
    """The body of an answer exceeds its limit; the rest of it was not read."""


def bearer_headers(variable: str | None, key: str) -> dict[str, str]:
    """Headers with the API key of an environment variable; none without a variable. key: the setting that names it."""
    if variable is None:
        return {}
    if not (value := os.environ.get(variable)):
        raise ValueError(f"{key}={variable}: this environment variable is not set")
    return {"Authorization": f"Bearer {value}"}


async def request_limited(
    client: httpx2.AsyncClient, method: str, url: str, *, json: Any = None, max_bytes: int = MAX_ANSWER_BYTES
) -> httpx2.Response:
    """The response with its whole body, decompressed, of at most `max_bytes`; AnswerTooLargeError otherwise."""
    async with client.stream(method, url, json=json) as response:
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > max_bytes:
                raise AnswerTooLargeError(f"{response.url}: the answer is larger than {max_bytes / 2**20:g} MiB")
    encoding = ("content-encoding", "content-length", "transfer-encoding")
    headers = [(name, value) for name, value in response.headers.multi_items() if name not in encoding]
    return httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


async def post_json(
    url: str, body: Any, *, timeout_s: float, attempts: int = 5, headers: Mapping[str, str] | None = None
) -> Any:
    """The JSON answer; HttpError if there is none within `timeout_s`, all attempts and pauses included."""
    problem = ""
    try:
        async with (
            asyncio.timeout(timeout_s),
            httpx2.AsyncClient(headers=headers, timeout=None, verify=_tls(), trust_env=not is_local(url)) as client,
        ):
            for attempt in range(attempts):
                if attempt:
                    await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (attempt - 1), MAX_PAUSE_S))
                try:
                    response = await request_limited(client, "POST", url, json=body)
                except httpx2.TransportError as error:
                    problem = f"{type(error).__name__}: {error}"
                    continue
                if response.status_code not in RETRIED:
                    return _content_of(response)
                problem = _problem_of(response)
    except TimeoutError as error:
        raise HttpError(f"{url}: no answer within {timeout_s:g} s" + (f" ({problem})" if problem else "")) from error
    except httpx2.InvalidURL as error:
        raise HttpError(f"{url}: {error}") from error
    raise HttpError(f"{url}: {problem} ({attempts} attempts)")


def is_local(url: str) -> bool:
    """Whether it is a server on this machine, for which a proxy of the environment is not meant."""
    return httpx2.URL(url).host in ("localhost", "127.0.0.1", "::1")


def _content_of(response: httpx2.Response) -> Any:
    if response.status_code >= 400:
        raise HttpError(f"{response.url}: {_problem_of(response)}")
    try:
        return response.json()
    except ValueError as error:  # also text that is not UTF-8
        raise HttpError(f"{response.url}: the answer is not JSON") from error


def _problem_of(response: httpx2.Response) -> str:
    return f"status {response.status_code}: {' '.join(response.text.split())[:200]}"


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all clients: reading the certificates takes longer than a request."""
    return httpx2.create_ssl_context()
