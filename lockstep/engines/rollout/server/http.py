"""The HTTP connection to one inference server."""

import asyncio
import json
import logging
import os
from typing import Any

import httpx2

from lockstep.config.actor_rollout_ref import ServerConfig
from lockstep.utils.json_http import AnswerTooLargeError, request_limited
from lockstep.utils.progress import waiting

KEY = "actor_rollout_ref.rollout.server"
RETRIED = {408, 424, 425, 429, 500, 502, 503, 504}
"""Status codes of failures that may pass; 424 is TGI's for a request that failed in its model."""

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request


class ServerError(ConnectionError):
    """A server that cannot be used. The message is one line with its URL."""


class Unavailable(ServerError):
    """No usable answer this time; the request may be sent again."""


class Connection:
    """Lives in the engine's event loop. paths: optional ones of its protocol that the server has."""

    def __init__(self, url: str, config: ServerConfig) -> None:
        self.url = url.rstrip("/")
        self.config = config
        self.paths: set[str] = set()
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=_headers(config),
            timeout=httpx2.Timeout(None, connect=config.connect_timeout_s),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=config.max_outstanding),
            trust_env=False,  # a proxy of the environment is not meant for servers of the cluster
        )

    async def get(self, path: str) -> Any:
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Any = None) -> Any:
        """The JSON answer; None if the answer is no JSON."""
        return await self._request("POST", path, body)

    async def has(self, path: str) -> bool:
        """Whether it accepts POST there: GET is then answered with 405, without effect."""
        return (await self._send("GET", path, None)).status_code == 405

    async def _request(self, method: str, path: str, body: Any) -> Any:
        response = await self._send(method, path, body)
        if response.status_code >= 400:
            kind = Unavailable if response.status_code in RETRIED else ServerError
            raise kind(f"{self.url}{path} answered {response.status_code}: {_reason(response.text)}")
        try:
            return response.json()
        except json.JSONDecodeError:
            return None

    async def _send(self, method: str, path: str, body: Any) -> httpx2.Response:
        timeout_s = self.config.timeout_s
        try:
            with waiting("server", f"{self.url}{path}"):
                return await asyncio.wait_for(request_limited(self._http, method, path, json=body), timeout_s)
        except AnswerTooLargeError as error:
            raise ServerError(str(error)) from error
        except TimeoutError as error:
            raise Unavailable(f"{self.url}{path}: no answer within {KEY}.timeout_s={timeout_s:g}") from error
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unavailable(f"{self.url}: cannot connect ({error or type(error).__name__})") from error
        except httpx2.TransportError as error:
            raise Unavailable(f"{self.url}: connection lost ({error or type(error).__name__})") from error

    async def close(self) -> None:
        await self._http.aclose()


def _headers(config: ServerConfig) -> dict[str, str]:
    if config.api_key_env is None:
        return {}
    value = os.environ.get(config.api_key_env)
    if not value:
        raise ValueError(f"{KEY}.api_key_env={config.api_key_env}: this environment variable is not set on the worker")
    return {"Authorization": f"Bearer {value}"}


def _reason(text: str) -> str:
    """The message in an error's body, on one line."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        body = None
    if isinstance(body, dict):
        inner = body.get("error", body)
        text = str(inner.get("message") or inner.get("detail") or inner) if isinstance(inner, dict) else str(inner)
    words = " ".join(text.split())
    return words if len(words) <= 300 else f"{words[:300]}…"
