"""The HTTP server: the page and its files, the JSON of `api/`, and events for live updates."""

import asyncio
import hmac
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lockstep.observability.dashboard.api.health import DOCS
from lockstep.observability.dashboard.health_view import run_state
from lockstep.observability.dashboard.page import APIS, POSTS, STATIC, json_bytes, plotly_script
from lockstep.observability.dashboard.request import Api, ApiRequest, NotFound, Stream
from lockstep.observability.dashboard.runs import RunFolder, Runs
from lockstep.observability.dashboard.talk_server import TalkServer
from lockstep.observability.run_folder import STATUS
from lockstep.utils.local_http import names_loopback
from lockstep.utils.untrusted import JSON_ERRORS

logger = logging.getLogger(__name__)

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MOST_BODY_BYTES = 4 * 2**20
POLL_INTERVAL_S = 1.0
HEARTBEAT_S = 15.0
"""After this time without a change a page gets a line of no meaning, which shows whether it is still there."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Run data is text: no script, style or frame can come from it."""


class DashboardApp:
    """token: what browsers must send, as `?token=` once and as a cookie from then on; None serves only requests to loopback."""

    def __init__(self, runs: Runs, token: str | None = None) -> None:
        self.runs, self.token = runs, token
        self.talk = TalkServer()
        self.num_listening = 0
        self._stopping = asyncio.Event()
        self._looking = asyncio.Lock()
        self._looked_at = -math.inf
        self._last_look: dict[str, RunNow] = {}
        routes = [
            Route("/", self._guarded(self._page)),
            Route("/static/{name:path}", self._guarded(self._file)),
            Route("/docs/{name}", self._guarded(self._docs)),
            Route("/plotly.js", self._guarded(self._plotly)),
            Route("/api/events", self._guarded(self._events)),
        ]
        routes += [Route(path, self._guarded(self._answering(api))) for path, api in APIS.items()]
        routes += [Route(path, self._guarded(self._answering(api)), methods=["POST"]) for path, api in POSTS.items()]
        self.app = Starlette(routes=routes)

    def stop(self) -> None:
        """End what streams and the served checkpoint, so that the server can end at once."""
        self._stopping.set()
        self.talk.kill()

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            if (refusal := self._refusal(request)) is not None:
                return PlainTextResponse(refusal, status_code=403)
            response = await handler(request)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return guarded

    def _refusal(self, request: Request) -> str | None:
        """Why a request has no access: other pages in a browser of this machine must not reach the dashboard."""
        origin = request.headers.get("origin")
        host = request.headers.get("host", "")
        if origin is not None and origin.partition("://")[2] != host:
            return "requests of other pages are refused"
        content_type = request.headers.get("content-type", "").partition(";")[0].strip()
        if request.method == "POST" and content_type != "application/json":
            return "the content type must be application/json, which other pages cannot send"
        if self.token is None:
            return None if names_loopback(request.headers.getlist("host")) else "only this machine has access"
        given = request.query_params.get("token") or request.cookies.get(_cookie(request), "")
        return (
            None
            if hmac.compare_digest(given.encode(), self.token.encode())
            else "wrong or missing token: open /?token=TOKEN"
        )

    async def _page(self, request: Request) -> Response:
        response = Response((STATIC / "index.html").read_bytes(), media_type="text/html; charset=utf-8")
        if self.token is not None:
            response.set_cookie(_cookie(request), self.token, httponly=True, samesite="strict")
        return response

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        path = (STATIC / name).resolve() if name.isprintable() else STATIC
        if not path.is_relative_to(STATIC) or path.suffix not in TYPES or not os.path.isfile(path):
            return PlainTextResponse("not found", status_code=404)
        return Response(path.read_bytes(), media_type=f"{TYPES[path.suffix]}; charset=utf-8")

    async def _docs(self, request: Request) -> Response:
        path = DOCS / request.path_params["name"]
        if path.suffix != ".md" or not os.path.isfile(path):
            return PlainTextResponse(f"docs/{path.name[:100]} is not installed here", status_code=404)
        return PlainTextResponse(path.read_bytes())

    async def _plotly(self, request: Request) -> Response:
        return Response(
            plotly_script().encode(),
            media_type="text/javascript; charset=utf-8",
            headers={"cache-control": "max-age=86400"},
        )

    def _answering(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                api_request = await self._api_request(request)
                data = await anyio.to_thread.run_sync(api, api_request)
                if isinstance(data, Stream):
                    return StreamingResponse(_event_lines(data), media_type="text/event-stream")
                return json_response(data)
            except ClientDisconnect:
                return Response(status_code=400)
            except NotFound as error:
                return json_response({"error": str(error)}, 404)
            except ValueError as error:
                return json_response({"error": str(error)}, 400)
            except OSError as error:  # a run that is being written, moved or deleted
                return json_response({"error": f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")}, 404)
            except Exception as error:
                logger.exception("%s failed", request.url.path)
                return json_response({"error": f"the dashboard failed: {type(error).__name__}: {error}"}, 500)

        return answer

    async def _api_request(self, request: Request) -> ApiRequest:
        if request.method != "POST":
            return ApiRequest(self.runs, dict(request.query_params), talk=self.talk)
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > MOST_BODY_BYTES:
                raise ValueError(f"the request is larger than {MOST_BODY_BYTES >> 20} MiB")
        try:
            body = json.loads(content)
        except JSON_ERRORS as error:
            raise ValueError(f"the request is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ValueError("the request is not a JSON object")
        return ApiRequest(
            self.runs, {key: value for key, value in body.items() if isinstance(value, str)}, body, self.talk
        )

    async def _events(self, request: Request) -> Response:
        """One event per change of a run: a message for a step, an event `status` for a new status.json or another state."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self._changes(), media_type="text/event-stream")

    async def _changes(self) -> AsyncIterator[bytes]:
        seen: dict[str, RunNow] = {}
        told_at = time.monotonic()
        self.num_listening += 1
        try:
            while not self._stopping.is_set():
                now = await self._runs_now()
                for name in now.keys() | seen.keys():
                    for event in _events_of(name, seen.get(name), now.get(name)):
                        yield event
                        told_at = time.monotonic()
                if time.monotonic() - told_at > HEARTBEAT_S:
                    yield b":\n\n"
                    told_at = time.monotonic()
                seen = now
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), POLL_INTERVAL_S)
        finally:
            self.num_listening -= 1

    async def _runs_now(self) -> dict[str, "RunNow"]:
        """Every run as it is now, looked up once for all pages that listen."""
        async with self._looking:
            if time.monotonic() - self._looked_at > POLL_INTERVAL_S / 2:
                self._last_look = await anyio.to_thread.run_sync(self._look)
                self._looked_at = time.monotonic()
            return self._last_look

    def _look(self) -> dict[str, "RunNow"]:
        return {run.name: self._guarded_run_now(run) for run in self.runs.all()}

    def _guarded_run_now(self, run: RunFolder) -> "RunNow":
        """A run that cannot be read does not hide the others."""
        try:
            return self._run_now(run)
        except Exception as error:
            if run.name not in self._last_look:  # once
                logger.warning("the run %s cannot be read: %s", run.folder, error, exc_info=True)
            return RunNow(0, 0, "unknown")

    def _run_now(self, run: RunFolder) -> "RunNow":
        before = self._last_look.get(run.name)
        step, written_ns = run.metrics.last()[0], run.written_ns(STATUS)
        changes_with_time = before is None or before.state in ("running", "silent")
        if before is not None and before.written_ns == written_ns and not changes_with_time:
            return RunNow(step, written_ns, before.state)
        return RunNow(step, written_ns, run_state(run))


@dataclass(frozen=True)
class RunNow:
    """The last step of a run, when its status was written, and its state."""

    step: int
    written_ns: int
    state: Any


def _events_of(name: str, before: RunNow | None, now: RunNow | None) -> Iterator[bytes]:
    """What pages are told of a run."""
    step = None if now is None else now.step
    if before is None or before.step != step:
        yield event_bytes({"run": name, "step": step})
    if now is not None and (before is None or (before.written_ns, before.state) != (now.written_ns, now.state)):
        yield b"event: status\n" + event_bytes({"run": name, "state": now.state})


class DashboardServer(uvicorn.Server):
    """Serves until Ctrl-C, SIGTERM or `stop`; open pages do not hold it up."""

    def __init__(self, app: DashboardApp) -> None:
        super().__init__(
            uvicorn.Config(app.app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1)
        )
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.stop()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        self._app.stop()
        self.should_exit = True


def _cookie(request: Request) -> str:
    """Cookies are shared by all ports of a host, and each may have its own dashboard."""
    return f"lockstep_dashboard_{request.url.port or 'default'}"


async def _event_lines(stream: Stream) -> AsyncIterator[bytes]:
    async with aclosing(stream.events) as events:  # type: ignore[type-var]
        async for event in events:
            yield event_bytes(event)


def event_bytes(event: Any) -> bytes:
    """A server-sent event with JSON."""
    return b"data: " + json_bytes(event) + b"\n\n"


def json_response(data: Any, status: int = 200) -> Response:
    return Response(json_bytes(data), status, media_type="application/json")
