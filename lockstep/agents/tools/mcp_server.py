"""The connection to an MCP server: one session per process, which all conversations share.

calls, each in its own thread ─► the event loop of this module's thread ─► session ─► server
                                                                        (stdio, streamable HTTP or SSE)

A session that breaks fails the calls in flight; the next call opens a new one, which starts a stdio server again.
"""

import asyncio
import logging
import math
import os
import re
import shutil
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.agents.tools.calls import ToolError
from lockstep.utils.progress import waiting

if TYPE_CHECKING:
    from mcp import Client, Tool
    from mcp.types import CallToolResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHILD = str(Path(__file__).with_name("mcp_child.py"))
RETRY_PAUSE_S = 1.0
"""After a failed connection, calls fail at once for this time instead of trying again."""
CLOSE_TIMEOUT_S = 10.0
STDERR_LINES = 5
"""Last lines of a stdio server's stderr that a failed start is reported with."""
KEYS = {
    "stdio": ("command", "args", "env", "cwd"),
    "http": ("url", "headers", "auth_token"),
    "sse": ("url", "headers", "auth_token"),
}
VARIABLE = re.compile(r"\$\{(\w+)\}")
TYPES = {"streamable-http": "http", "streamable_http": "http"}


class McpServer:
    """name: of its entry in `mcpServers`. entry: its settings; `${NAME}` in them is an environment variable."""

    def __init__(self, name: str, entry: Mapping[str, Any], *, connect_timeout_s: float, calls_per_s: float) -> None:
        self.name = name
        self.kind, self._entry = _checked(name, entry)
        self._place = _place_of(entry)
        self._connect_timeout_s = connect_timeout_s
        self._calls_per_s = calls_per_s
        self._next_call = 0.0
        self._session: _Session | None = None
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)

    def __str__(self) -> str:
        return f"MCP server {self.name} ({self._place})"

    def list_tools(self) -> "list[Tool]":
        """The tools that the server offers; ValueError if it cannot be reached."""
        try:
            with waiting("server", str(self)):
                return _submit(self._list_tools()).result()
        except ToolError as error:
            raise ValueError(f"MCP server {error}") from error

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float | None) -> "CallToolResult":
        """The result of a call, from any event loop; ToolError if there is none."""
        return await asyncio.wrap_future(_submit(self._call(tool, arguments, timeout_s)))

    def close(self) -> None:
        """End the session, and the process of a stdio server."""
        try:
            _submit(self._close()).result(CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("the MCP server %s did not end within %g s", self.name, CLOSE_TIMEOUT_S)

    async def _list_tools(self) -> "list[Tool]":
        from mcp import MCPError

        client = await self._connected().client
        found: list[Tool] = []
        cursor: str | None = None
        try:
            while True:
                page = await asyncio.wait_for(client.list_tools(cursor=cursor), self._connect_timeout_s)
                found += page.tools
                if (cursor := page.next_cursor) is None:
                    return found
        except (MCPError, TimeoutError) as error:
            raise ToolError(f"{self.name} does not list its tools: {str(error) or 'no answer'}") from error

    async def _call(self, tool: str, arguments: dict[str, Any], timeout_s: float | None) -> "CallToolResult":
        from mcp import MCPError
        from mcp.types import REQUEST_TIMEOUT

        await self._wait_for_turn()
        for is_retry in (False, True):
            session = self._connected()
            client = await asyncio.shield(session.client)  # others wait for it too
            try:
                return await client.call_tool(tool, arguments, read_timeout_seconds=timeout_s)
            except MCPError as error:
                if error.code == REQUEST_TIMEOUT:
                    limit = "" if timeout_s is None else f": more than {timeout_s:g} s"
                    raise ToolError(f"the call took too long{limit}") from error
                if not await session.is_lost(error):
                    raise ToolError(error.message) from error
                if is_retry or not session.was_unreachable(error):
                    raise ToolError(f"the MCP server {self.name} ended during the call") from error
        raise AssertionError

    async def _close(self) -> None:
        if self._session is not None:
            self._session.over.set()
            await asyncio.wait([self._session.task])

    async def _wait_for_turn(self) -> None:
        now = asyncio.get_running_loop().time()
        self._next_call = max(now, self._next_call + 1 / self._calls_per_s)
        await asyncio.sleep(self._next_call - now)

    def _connected(self) -> "_Session":
        """The session, or a new one if it is over."""
        if self._session is None or self._session.can_be_replaced:
            if self._session is not None:
                logger.warning("the session of MCP server %s ended; opening a new one", self.name)
            self._session = _Session(self._transport(), self._connect_timeout_s, self._describe)
        return self._session

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        if self.kind == "stdio":
            return self._stdio()
        headers = dict(self._entry.get("headers") or {})
        if token := self._entry.get("auth_token"):
            headers["Authorization"] = f"Bearer {token}"
        if self.kind == "sse":
            from mcp.client.sse import sse_client

            return sse_client(
                self._entry["url"], headers=headers, timeout=self._connect_timeout_s, sse_read_timeout=1e9
            )
        return _http(self._entry["url"], headers)

    @asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        from mcp import StdioServerParameters, stdio_client

        entry = self._entry
        command = [sys.executable, "-I", "-S", CHILD, str(os.getpid()), entry["command"], *entry.get("args", [])]
        parameters = StdioServerParameters(
            command=command[0], args=command[1:], env=entry.get("env"), cwd=entry.get("cwd")
        )
        reader, writer = os.pipe()
        threading.Thread(target=self._read_stderr, args=(reader,), name="mcp_stderr", daemon=True).start()
        with os.fdopen(writer, "w") as errlog:
            async with stdio_client(parameters, errlog) as streams:
                yield streams

    def _read_stderr(self, reader: int) -> None:
        with os.fdopen(reader, errors="replace") as lines:
            for line in lines:
                self._stderr.append(line.strip())
                logger.debug("%s: %s", self.name, line.rstrip())

    def _describe(self, error: BaseException) -> str:
        """Why no session could be opened, in one line."""
        cause = _first_of(error)
        reason = (
            f"no answer within {self._connect_timeout_s:g} s"
            if isinstance(cause, TimeoutError)
            else f"{type(cause).__name__}: {cause}"
        )
        stderr = f"; its stderr ends with: {' | '.join(self._stderr)}" if self._stderr else ""
        return f"{self.name} cannot be reached ({self._place}): {reason}{stderr}"


class _Session:
    """client: the open session, or ToolError. over: set to end it, and if the server closes its streams."""

    def __init__(self, transport: AbstractAsyncContextManager[Any], timeout_s: float, describe: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._describe = describe
        self.client: asyncio.Future[Client] = self._loop.create_future()
        self.over = asyncio.Event()
        self._error: BaseException | None = None
        self._ended_at = math.inf
        self.task = asyncio.create_task(self._hold(transport, timeout_s))

    @property
    def can_be_replaced(self) -> bool:
        has_failed = self.client.done() and self.client.exception() is not None
        return self._loop.time() > self._ended_at + RETRY_PAUSE_S if has_failed else self.over.is_set()

    async def is_lost(self, error: Any) -> bool:
        """Whether a call failed because the session is over; waits for its end."""
        from mcp.types import CONNECTION_CLOSED

        if error.code != CONNECTION_CLOSED and error.message != SESSION_UNKNOWN:
            return False
        self.over.set()
        await asyncio.wait([self.task])
        return True

    def was_unreachable(self, error: Any) -> bool:
        """Whether the server cannot have received the call of a lost session."""
        import httpx2

        return error.message == SESSION_UNKNOWN or isinstance(_first_of(self._error), httpx2.ConnectError)

    async def _hold(self, transport: AbstractAsyncContextManager[Any], timeout_s: float) -> None:
        """Open the session and keep it until it is over, all in one task, as anyio requires."""
        import anyio
        from mcp import Client

        try:
            with anyio.fail_after(timeout_s) as scope:
                async with Client(_watched(transport, self.over)) as client:
                    scope.deadline = math.inf
                    self.client.set_result(client)
                    await self.over.wait()
        except Exception as error:  # noqa: BLE001 - any failure of a server; reported by calls
            self._error = error
        finally:
            self.over.set()
            self._ended_at = self._loop.time()
            if not self.client.done():
                self.client.set_exception(ToolError(self._describe(self._error or EOFError("it ended"))))
                self.client.exception()  # no caller may be left to read it


SESSION_UNKNOWN = "Session terminated"
"""What the library reports if an HTTP server does not know the session, because it was restarted."""


@asynccontextmanager
async def _watched(transport: AbstractAsyncContextManager[Any], closed: asyncio.Event) -> AsyncIterator[Any]:
    """The same transport; sets `closed` when the server's messages end."""
    import anyio

    async with transport as (messages, requests):
        sender, receiver = anyio.create_memory_object_stream[Any](0)

        async def relay() -> None:
            async with sender:
                async for message in messages:
                    await sender.send(message)
            closed.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(relay)
            try:
                yield receiver, requests
            finally:
                tasks.cancel_scope.cancel()


@asynccontextmanager
async def _http(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
    # Calls have deadlines; a response may take as long as they allow.
    timeout = httpx2.Timeout(None, connect=10.0)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


def _checked(name: str, entry: Any) -> tuple[str, dict[str, Any]]:
    """The transport and the settings of a server; ValueError if they are wrong."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"MCP server {name}: must have `command` or `url`, not {entry!r}")
    try:
        settings = {key: _expanded(value) for key, value in entry.items()}
    except ValueError as error:
        raise ValueError(f"MCP server {name}: {error}") from error
    kind = (
        settings.pop("type", None) or settings.pop("transport", None) or ("stdio" if "command" in settings else "http")
    )
    kind = TYPES.get(kind, kind)
    if kind not in KEYS:
        raise ValueError(f"MCP server {name}: type={kind}; allowed: stdio, http, sse")
    if unknown := sorted(set(settings) - set(KEYS[kind])):
        raise ValueError(
            f"MCP server {name}: unknown {', '.join(unknown)}; a {kind} server has {', '.join(KEYS[kind])}"
        )
    if not isinstance(settings.get(needed := KEYS[kind][0]), str):
        raise ValueError(f"MCP server {name}: `{needed}` must be text")
    path = (settings.get("env") or {}).get("PATH")
    if kind == "stdio" and shutil.which(settings["command"], path=path) is None:
        raise ValueError(f"MCP server {name}: there is no program {settings['command']!r}")
    return kind, settings


def _place_of(entry: Mapping[str, Any]) -> str:
    """URL or command for messages: as written, because environment variables may hold secrets."""
    return str(entry.get("url") or " ".join([entry["command"], *map(str, entry.get("args") or ())]))


def _expanded(value: Any) -> Any:
    """With environment variables in place of `${NAME}`; ValueError if one is not set."""
    if isinstance(value, Mapping):
        return {key: _expanded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return VARIABLE.sub(_variable, value) if isinstance(value, str) else value


def _variable(match: re.Match[str]) -> str:
    if (value := os.environ.get(match[1])) is None:
        raise ValueError(f"the environment variable {match[1]} is not set")
    return value


def _first_of(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _submit(call: Coroutine[Any, Any, T]) -> Any:
    return asyncio.run_coroutine_threadsafe(call, _event_loop())


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all sessions. Its thread never ends, because stdio servers end with the thread that started them."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop
