"""`lockstep serve` of one checkpoint at a time, as a child process that ends with the dashboard.

start ─► loading ─► ready ─► chat ... ─► stop          failed: the process has ended; its last lines say why
"""

import json
import os
import re
import secrets
import signal
import subprocess
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from lockstep.utils.child_process import how_it_ended, start_module, wait_or_kill
from lockstep.utils.host_memory import budgets
from lockstep.utils.model_path import locate_model

Device = Literal["cpu", "auto"]
State = Literal["loading", "ready", "failed"]
GRACE_S = 3.0
MOST_LOG_LINES = 40
LONGEST_LINE = 2000
TOKEN_VARIABLE = "LOCKSTEP_SERVE_TOKEN"
MODEL = "policy"
SERVED_AT = re.compile(r"serving \S+ at (http://\S+)/v1 ")
SPARE_BYTES = 1 << 30
"""What must stay free for others, and Python with its libraries."""
WEIGHTS = ("*.safetensors", "*.bin")


@dataclass
class _Child:
    """One served checkpoint. url: once it serves."""

    run: str
    checkpoint: str
    device: Device
    token: str
    process: "subprocess.Popen[bytes]"
    url: str = ""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_LOG_LINES))

    def state(self) -> State:
        if self.process.poll() is not None:
            return "failed"
        return "ready" if self.url else "loading"

    def follow(self, output: IO[bytes]) -> None:
        """Keep the last lines of its output, and the address when it is told."""
        for line in iter(lambda: output.readline(LONGEST_LINE), b""):
            text = line.decode(errors="replace").rstrip()
            self.log.append(text)
            if found := SERVED_AT.match(text):
                self.url = found[1]
        output.close()

    def kill(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


class TalkServer:
    """At most one server. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False

    def status(self) -> dict[str, Any] | None:
        """None without a server."""
        child = self._child
        if child is None:
            return None
        state = child.state()
        return {
            "run": child.run,
            "checkpoint": child.checkpoint,
            "device": child.device,
            "state": state,
            "problem": f"the server {how_it_ended(child.process.returncode)}" if state == "failed" else None,
            "log": list(child.log) if state != "ready" else [],
        }

    def start(self, run: str, checkpoint: Path, device: Device) -> None:
        """Serve this checkpoint in place of the one before. ValueError if it has no model, or memory is short."""
        with self._lock:
            if self._closed:
                raise ValueError("the dashboard is being stopped")
            self._end()
            refuse_short_memory(checkpoint)
            token = secrets.token_urlsafe(24)
            process = start_module(
                *("lockstep.utils.tied_process", "lockstep.cli", "serve", str(checkpoint)),
                *("--port", "0", "--name", MODEL, "--device", device, "--max-num-seqs", "4"),
                variables={TOKEN_VARIABLE: token},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self._child = child = _Child(run, checkpoint.name, device, token, process)
            threading.Thread(target=child.follow, args=(process.stdout,), daemon=True, name="talk").start()

    def stop(self) -> None:
        with self._lock:
            self._end()

    def kill(self) -> None:
        """End it at once and start none again; does not wait."""
        self._closed = True
        if self._child is not None:
            self._child.kill(signal.SIGKILL)

    def _end(self) -> None:
        if (child := self._child) is None:
            return
        self._child = None
        child.kill(signal.SIGTERM)
        wait_or_kill(child.process, GRACE_S)
        if child.process.stdin is not None:
            child.process.stdin.close()

    def chat(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The answer as events: {"text": ...} as it is generated, then {"end": why} or {"error": words}."""
        child = self._child
        if child is None or child.state() != "ready":
            raise ValueError("no checkpoint is being served: load one first")
        return _answer(f"{child.url}/v1/chat/completions", child.token, chat_request(body))


async def _answer(url: str, token: str, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    import httpx2  # only now: the page opens without it

    headers = {"authorization": f"Bearer {token}"}
    try:
        async with (
            httpx2.AsyncClient(timeout=None, trust_env=False, headers=headers) as client,
            client.stream("POST", url, json=request) as response,
        ):
            if response.status_code != 200:
                yield {"error": _words(await response.aread())}
                return
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    for event in _events(line.removeprefix("data: ")):
                        yield event
    except httpx2.HTTPError as error:
        yield {"error": f"the server ended in the middle of its answer ({type(error).__name__})"}


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """What `lockstep serve` gets for the page's request."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= 400:
        raise ValueError("messages: must be a list of 1 to 400")
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ("system", "user", "assistant")
            or not isinstance(message.get("content"), str)
        ):
            raise ValueError("messages: each needs a role (system, user, assistant) and a content, which is text")
    return {
        "model": MODEL,
        "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
        "stream": True,
        "temperature": _number(body, "temperature", 1.0, 0.0, 5.0),
        "top_p": _number(body, "top_p", 1.0, 0.001, 1.0),
        "max_tokens": int(_number(body, "max_tokens", 512, 1, 32768)),
    }


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name}: must be a number from {low:g} to {high:g}")
    return float(value)


def _events(line: str) -> list[dict[str, Any]]:
    try:
        chunk = json.loads(line)
        if "error" in chunk:
            return [{"error": str(chunk["error"].get("message"))}]
        (choice,) = chunk["choices"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [{"error": f"the server's answer cannot be read: {error!r}"}]
    text, calls = choice["delta"].get("content"), choice["delta"].get("tool_calls")
    events: list[dict[str, Any]] = [{"text": text}] if text else []
    events += [{"text": json.dumps(call.get("function"), ensure_ascii=False)} for call in calls or ()]
    return events + ([{"end": choice["finish_reason"]}] if choice.get("finish_reason") else [])


def _words(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500].decode(errors="replace")


def refuse_short_memory(checkpoint: Path) -> None:
    """ValueError if the weights do not fit into this machine's free memory twice: as a file's pages and as tensors."""
    folder = locate_model(checkpoint, "MODEL")
    if not isinstance(folder, Path):
        return
    weights = sum(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern))
    needed, free = 2 * weights + SPARE_BYTES, available_memory()
    if free is not None and needed > free:
        raise ValueError(
            f"{checkpoint.name} needs about {needed / 2**30:.1f} GiB of memory, and this machine has {free / 2**30:.1f} GiB "
            "left: wait until the run has ended, or use `lockstep serve` on another machine"
        )


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a new process can get, by the machine and by the limits of its cgroups; None if the system does not say."""
    return min((budget.available for budget in budgets(root)), default=None)
