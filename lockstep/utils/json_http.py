"""A JSON request with a deadline: failures that may pass are retried with growing pauses."""

import asyncio
import functools
import ssl
from collections.abc import Mapping
from typing import Any

import httpx2

RETRIED = {408, 425, 429, 500, 502, 503, 504}
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0


class HttpError(ConnectionError):
    """No usable answer. The message is one line with the URL."""


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
                    response = await client.post(url, json=body)
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
