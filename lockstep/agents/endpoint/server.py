"""The HTTP server: routes, access, sessions, disconnected clients.

http://127.0.0.1:PORT/s/SESSION/v1   the base URL of one session, for OpenAI's clients (Anthropic's take it without /v1)
"""

import asyncio
import hmac
import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lockstep.agents.conversation import Generate
from lockstep.agents.endpoint import messages
from lockstep.agents.endpoint.answers import Answer, AnswerSettings, Session, merged
from lockstep.agents.endpoint.chat import ChatCompletions
from lockstep.agents.endpoint.completions import Completions
from lockstep.agents.endpoint.errors import ApiError, invalid
from lockstep.agents.endpoint.fields import Event, Items, ProtocolCall, now
from lockstep.agents.endpoint.recorder import SessionRecorder
from lockstep.agents.endpoint.responses import Responses
from lockstep.agents.renderer import Renderer
from lockstep.utils.local_http import bind, is_loopback, names_loopback

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 64 * 2**20
SESSION_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
GRACE_S = 30
"""How long running requests may take when the server stops."""


@dataclass(frozen=True)
class ServerSettings:
    """host:       addresses other than loopback need a token.
    port:          0 takes a free one.
    token:         what clients send as `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`.
    models:        names that requests may have as `model`; "*" is any name.
    open_sessions: create a session at its first request, keep the `max_sessions` used last, and serve requests without one.
                   Otherwise requests need a session of `Endpoint.open_session`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    models: tuple[str, ...] = ("policy",)
    open_sessions: bool = False
    max_sessions: int = 256

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is not loopback, so everyone who reaches it could use the model: set a token"
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.strip()):
            raise ValueError("the token must be printable ASCII text")


@dataclass
class Counters:
    """num_aborted: requests whose client went away before the end."""

    num_requests: int = 0
    num_failed: int = 0
    num_aborted: int = 0


class Endpoint:
    """Serves `generate` while `running()`, on the event loop that enters it.

    generate, answers: of sessions that are not opened with their own; None if all are.
    renderer:          of the policy's tokenizer.
    """

    def __init__(
        self, generate: Generate | None, renderer: Renderer, answers: AnswerSettings | None, server: ServerSettings
    ) -> None:
        self.generate, self.renderer, self.answers, self.settings = generate, renderer, answers, server
        self.counters = Counters()
        self.url = ""
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._running: set[asyncio.Task[Any]] = set()
        self._server: _Server | None = None
        self._created = now()
        # one thread: prompts are made in the order of their requests, and no two of them take memory at a time
        self._thread = ThreadPoolExecutor(1, "endpoint")
        self.app = Starlette(routes=self._routes(), exception_handlers={HTTPException: self._http_error})

    def has_session(self, name: str) -> bool:
        return name in self._sessions

    def open_session(
        self,
        name: str,
        generate: Generate | None = None,
        answers: AnswerSettings | None = None,
        trusted: Collection[str] = (),
    ) -> str:
        """Create a session; returns its base URL for OpenAI's clients.

        generate, answers: of this session, instead of the endpoint's.
        trusted:           contents of messages whose special tokens stay, such as those of the row.
        """
        if not SESSION_NAME.fullmatch(name):
            raise ValueError(f"session name {name!r}: must be 1 to 128 letters, digits, '.', '_' or '-'")
        if name in self._sessions:
            raise ValueError(f"session {name!r} exists already")
        self._sessions[name] = self._session(name, generate or self.generate, answers or self.answers, trusted)
        return f"{self.url}/s/{name}/v1"

    def close_session(self, name: str) -> SessionRecorder:
        """Refuse further requests of the session; returns what it recorded."""
        return self._sessions.pop(name).recorder

    @asynccontextmanager
    async def running(self) -> "AsyncIterator[Endpoint]":
        """Listen; on leaving, running requests may end within `GRACE_S`, or until `stop_now`."""
        listener = bind(self.settings.host, self.settings.port)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            self.app,
            log_config=None,
            log_level="warning",
            lifespan="off",
            ws="none",
            timeout_keep_alive=120,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Server(config)
        task = asyncio.create_task(self._server.serve(sockets=[listener]))
        try:
            while not self._server.started and not task.done():
                await asyncio.sleep(0.005)
            yield self
        finally:
            self._server.should_exit = True
            await task
            for request in self._running:
                request.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _watched(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; it is cancelled if the client goes away, which raises ClientGone."""

        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        task, watcher = asyncio.create_task(work), asyncio.create_task(disconnected())
        self._running.add(task)
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or task.cancelled():
                raise ClientGone
            return task.result()
        finally:
            self._running.discard(task)
            for each in (task, watcher):
                each.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)

    def stop_now(self) -> None:
        """Drop running requests when the server stops."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True

    def _routes(self) -> list[Route]:
        calls: dict[str, type[ProtocolCall]] = {
            "chat/completions": ChatCompletions,
            "completions": Completions,
            "responses": Responses,
            "messages": messages.Messages,
        }
        routes = [Route("/health", self._health, methods=["GET"])]
        routes += [Route("/s/{session}/turns", self._guarded(self._turns), methods=["GET"])]
        for base in ("/v1", "/s/{session}/v1"):
            for path, call in calls.items():
                routes.append(Route(f"{base}/{path}", self._guarded(self._answering(call)), methods=["POST"]))
            routes.append(Route(f"{base}/messages/count_tokens", self._guarded(self._count_tokens), methods=["POST"]))
            routes.append(Route(f"{base}/models", self._guarded(self._models), methods=["GET"]))
            routes.append(Route(f"{base}/models/{{model:path}}", self._guarded(self._models), methods=["GET"]))
        return routes

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler for clients that have access; errors in the form of the protocol."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_access(request)
                return await handler(request)
            except (ClientGone, ClientDisconnect):
                self.counters.num_aborted += 1
                return Response(status_code=499)  # nobody reads it
            except Exception as error:  # noqa: BLE001 - answered
                return _error_response(request, self._as_api_error(error))

        return guarded

    def _as_api_error(self, error: Exception) -> ApiError:
        self.counters.num_failed += 1
        if isinstance(error, ApiError):
            return error
        logger.error("a request failed", exc_info=error)
        return ApiError(500, f"the server failed: {type(error).__name__}: {error}", code="internal_error")

    def _check_access(self, request: Request) -> None:
        """Without a token only loopback is bound; pages in a browser of this machine must not reach it either."""
        token = self.settings.token
        if token is None:
            if not names_loopback(request.headers.getlist("host")) or "origin" in request.headers:
                raise ApiError(403, "only local programs have access: start the server with a token to allow others")
            return
        given = request.headers.get("x-api-key", "")
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = credentials.strip()
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise ApiError(401, "wrong or missing API key (the server's token)", code="invalid_api_key")

    def _answering(self, call_class: type[ProtocolCall]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = await self._body(request)
            session = self._session_of(request)
            async with self._used(session):
                call = await self._in_thread(lambda: call_class(self._json(body), session))
            if session.name == "":
                session.num_requests = self.counters.num_requests
            items = merged(session.start(call.prompts, call.request))
            self.counters.num_requests += 1
            if call.request.stream:
                return EventStream(self, session, call, items)
            async with self._used(session):
                answers = await self._watched(request.receive, _collected(items))
            return JsonResponse(call.document(answers))

        return answer

    async def _count_tokens(self, request: Request) -> Response:
        body = await self._body(request)
        session = self._session_of(request)
        async with self._used(session):
            count = await self._in_thread(lambda: messages.count_tokens(self._json(body), session))
        return JsonResponse(count)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """The result of what may take long: reading a body, rendering and tokenizing its messages."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    @asynccontextmanager
    async def _used(self, session: Session) -> AsyncIterator[None]:
        """The session is not dropped inside."""
        session.num_running += 1
        try:
            yield
        finally:
            session.num_running -= 1

    async def _body(self, request: Request) -> bytearray:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return body

    def _json(self, body: bytearray) -> Any:
        """The JSON of a request, of a model that is served."""
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise invalid(f"the body is not valid JSON: {error}") from error
        if isinstance(data, dict) and isinstance(data.get("model"), str):
            self._check_model(data["model"])
        return data

    def _check_model(self, name: str) -> None:
        known = self.settings.models
        if name not in known and "*" not in known:
            message = f"the model {name!r} does not exist; this server has {', '.join(known)}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _session(
        self, name: str, generate: Generate | None, answers: AnswerSettings | None, trusted: Collection[str] = ()
    ) -> Session:
        if generate is None or answers is None:
            raise ValueError(f"session {name!r} needs generate and answers: the endpoint has none")
        return Session(name, SessionRecorder(self.renderer, trusted), generate, answers)

    def _session_of(self, request: Request) -> Session:
        name = request.path_params.get("session")
        if name is None:
            if not self.settings.open_sessions:
                raise ApiError(404, "requests need the URL of a session: /s/SESSION/v1/...")
            return self._session("", self.generate, self.answers)  # for this request
        if name not in self._sessions:
            if not self.settings.open_sessions:
                raise ApiError(404, f"there is no session {name!r}")
            if not SESSION_NAME.fullmatch(name):
                raise invalid(f"session name {name[:128]!r}: must be 1 to 128 letters, digits, '.', '_' or '-'")
            self._sessions[name] = self._session(name, self.generate, self.answers)
            self._drop_old_sessions()
        self._sessions.move_to_end(name)
        return self._sessions[name]

    def _drop_old_sessions(self) -> None:
        idle = [name for name, session in self._sessions.items() if not session.num_running]
        for name in idle[: max(0, len(self._sessions) - self.settings.max_sessions)]:
            del self._sessions[name]

    async def _turns(self, request: Request) -> Response:
        """What a session recorded."""
        name = request.path_params["session"]
        if name not in self._sessions:
            raise ApiError(404, f"there is no session {name!r}")
        turns = self._sessions[name].recorder.turns
        numbers = {turn: number for number, turn in enumerate(turns)}
        fields = ("token_ids", "log_probs", "policy_versions", "stop_reason")
        rows = [
            {"parent": numbers.get(turn.parent) if turn.parent else None, "prompt_ids": turn.prompt_ids}
            | {field: getattr(turn.completion, field) for field in fields}
            | {"trainable": turn.trainable}
            for turn in turns
        ]
        return JsonResponse({"turns": rows})

    async def _models(self, request: Request) -> Response:
        name = request.path_params.get("model")
        if name is not None:
            self._check_model(name)
        names = [name] if name is not None else [model for model in self.settings.models if model != "*"]
        rows: list[dict[str, Any]]
        if "anthropic-version" in request.headers:
            day = "1970-01-01T00:00:00Z"
            rows = [{"type": "model", "id": model, "display_name": model, "created_at": day} for model in names]
            page: dict[str, Any] = {"has_more": False, "first_id": names[0] if names else None}
            page |= {"last_id": names[-1] if names else None}
        else:
            rows = [
                {"id": model, "object": "model", "created": self._created, "owned_by": "lockstep"} for model in names
            ]
            page = {"object": "list"}
        return JsonResponse(rows[0] if name is not None else {"data": rows, **page})

    async def _health(self, request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def _http_error(self, request: Request, error: Exception) -> Response:
        """Unknown paths and wrong methods."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _error_response(request, ApiError(error.status_code, message))


class JsonResponse(JSONResponse):
    """Lone surrogates, which clients may send in text that is repeated to them, are replaced."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


class EventStream(Response):
    """Sends the events of a call; if the client goes away, generation ends."""

    def __init__(self, endpoint: Endpoint, session: Session, call: ProtocolCall, items: Items) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.endpoint, self.session, self.call, self.items = endpoint, session, call, items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.endpoint._watched(receive, self._send(send))
        except ClientGone:
            self.endpoint.counters.num_aborted += 1

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with self.endpoint._used(self.session):
            try:
                async with aclosing(self.items), aclosing(self.call.events(self.items)) as events:  # type: ignore[type-var]
                    async for event in events:
                        await send({"type": "http.response.body", "body": _event_bytes(event), "more_body": True})
            except Exception as error:  # noqa: BLE001 - sent
                event = self.call.error_event(self.endpoint._as_api_error(error))
                await send({"type": "http.response.body", "body": _event_bytes(event), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class ClientGone(Exception):
    """The client closed the connection, or the server stops at once."""


async def _collected(items: Items) -> list[Answer]:
    """The answers, in the order of their streams."""
    answers = {}
    async with aclosing(items):  # type: ignore[type-var]
        async for number, item in items:
            if isinstance(item, Answer):
                answers[number] = item
    return [answers[number] for number in sorted(answers)]


def _event_bytes(event: Event) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode("utf-8", "replace")


def _error_response(request: Request, error: ApiError) -> Response:
    is_anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.url.path
    return JsonResponse(error.anthropic() if is_anthropic else error.openai(), status_code=error.status)


class _Server(uvicorn.Server):
    """Leaves signals to the program around it."""

    def capture_signals(self) -> Any:
        return nullcontext()
