"""The HTTP server: the page and its files, the JSON of `api/`, and events for live updates."""

import asyncio
import hmac
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lockstep.observability.dashboard.api import curves, health, runs as runs_api
from lockstep.observability.dashboard.health_view import run_state
from lockstep.observability.dashboard.request import Api, ApiRequest, NotFound
from lockstep.observability.dashboard.runs import Runs
from lockstep.observability.run_folder import STATUS
from lockstep.utils.local_http import names_loopback

logger = logging.getLogger(__name__)

STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
DOCS = Path(__file__).parents[3] / "docs"
"""The pages that findings name, in a checkout; an installed package does not have them."""
APIS: dict[str, Api] = runs_api.ROUTES | health.ROUTES | curves.ROUTES
POLL_INTERVAL_S = 1.0
COOKIE = "lockstep_dashboard"

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
        routes = [
            Route("/", self._guarded(self._page)),
            Route("/static/{name:path}", self._guarded(self._file)),
            Route("/docs/{name}", self._guarded(self._docs)),
            Route("/plotly.js", self._guarded(self._plotly)),
            Route("/api/events", self._guarded(self._events)),
        ]
        routes += [Route(path, self._guarded(self._answering(api))) for path, api in APIS.items()]
        self.app = Starlette(routes=routes)

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
        if self.token is None:
            return None if names_loopback(request.headers.getlist("host")) else "only this machine has access"
        given = request.query_params.get("token") or request.cookies.get(COOKIE, "")
        return (
            None
            if hmac.compare_digest(given.encode(), self.token.encode())
            else "wrong or missing token: open /?token=TOKEN"
        )

    async def _page(self, request: Request) -> Response:
        response = Response((STATIC / "index.html").read_bytes(), media_type="text/html; charset=utf-8")
        if self.token is not None:
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
        return response

    async def _file(self, request: Request) -> Response:
        path = (STATIC / request.path_params["name"]).resolve()
        if not path.is_relative_to(STATIC) or not path.is_file():
            return PlainTextResponse("not found", status_code=404)
        return Response(path.read_bytes(), media_type=f"{TYPES[path.suffix]}; charset=utf-8")

    async def _docs(self, request: Request) -> Response:
        path = DOCS / request.path_params["name"]
        if path.suffix != ".md" or not path.is_file():
            return PlainTextResponse(f"docs/{path.name} is not installed here", status_code=404)
        return PlainTextResponse(path.read_bytes())

    async def _plotly(self, request: Request) -> Response:
        return Response(
            plotly_script().encode(),
            media_type="text/javascript; charset=utf-8",
            headers={"cache-control": "max-age=86400"},
        )

    def _answering(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            api_request = ApiRequest(self.runs, dict(request.query_params))
            try:
                data = await anyio.to_thread.run_sync(api, api_request)
                return json_response(data)
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

    async def _events(self, request: Request) -> Response:
        """One event per change of a run: a message for a step, an event `status` for a new status.json."""
        return StreamingResponse(self._changes(), media_type="text/event-stream")

    async def _changes(self) -> AsyncIterator[bytes]:
        steps: dict[str, int] = {}
        written: dict[str, int] = {}
        while True:
            runs = await anyio.to_thread.run_sync(self.runs.all)
            now = await anyio.to_thread.run_sync(lambda: {run.name: run.metrics.last()[0] for run in runs})  # noqa: B023
            for name in now.keys() | steps.keys():
                if steps.get(name) != now.get(name):
                    yield f"data: {json.dumps({'run': name, 'step': now.get(name)})}\n\n".encode()
            steps = now
            for run in runs:
                if written.get(run.name) != (newest := run.written_ns(STATUS)):
                    written[run.name] = newest
                    yield f"event: status\ndata: {json.dumps({'run': run.name, 'state': run_state(run)})}\n\n".encode()
            await asyncio.sleep(POLL_INTERVAL_S)


def plotly_script() -> str:
    """The JavaScript that the plotly package ships."""
    try:
        return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ValueError("plotly is not installed: pip install 'lockstep-rl[dashboard]'") from error


def json_response(data: Any, status: int = 200) -> Response:
    """NaN and infinities, which JSON lacks, are null; lone surrogates, which models emit, are replaced."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), status, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
