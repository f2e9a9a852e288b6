"""The code tool: runs the policy's Python in the sandbox."""

import threading
from pathlib import Path
from typing import Any

from lockstep.agents.schemas import OpenAIFunctionToolSchema, ToolResponse
from lockstep.agents.tools.tool import TOOLS, BaseTool, Executed, tool_schema
from lockstep.rewards.sandbox import Limits, Sandbox, SandboxedProcess
from lockstep.utils.untrusted import valid_text

SERVER = Path(__file__).with_name("python_server.py").read_text()
MAX_OUTPUT_BYTES = 1 << 18


@TOOLS.register("python")
class PythonTool(BaseTool):
    """Runs `code` and returns what it prints, the value of a last expression, or the error.

    config: `keep_state` (false) keeps variables and files over the calls of a conversation; `timeout_s` (10) limits a call,
    `cpu_s` (10), `memory_mb` (512), `file_mb` (16) and `processes` (16) a sandbox. There is one sandbox per call, or per
    conversation with `keep_state`; it has no network and sees none of the machine's files (docs/sandbox.md).
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        known = ("keep_state", "timeout_s", "cpu_s", "memory_mb", "file_mb", "processes", "type")
        if unknown := sorted(set(config) - set(known)):
            raise ValueError(f"the python tool has no setting {', '.join(unknown)}; known: {', '.join(known[:-1])}")
        self.keep_state = bool(config.get("keep_state", False))
        self.timeout_s = float(config.get("timeout_s", 10.0))
        limits = Limits(
            cpu_s=float(config.get("cpu_s", 10.0)),
            wall_s=None if self.keep_state else self.timeout_s,
            memory_mb=int(config.get("memory_mb", 512)),
            file_mb=int(config.get("file_mb", 16)),
            processes=int(config.get("processes", 16)),
        )
        self.sandbox = Sandbox(limits)  # raises if this machine has no isolation
        self._processes: dict[str, SandboxedProcess | None] = {}
        """The sandbox of each conversation that keeps its state, until it is released; None while it is in use."""
        self._lock = threading.Lock()

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        code = {"type": "string", "description": "The code; print what you need."}
        return tool_schema("python", "Run Python code and return its output.", code=code)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        if self.keep_state:
            self._processes[instance_id] = None
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        process = self._take(instance_id) or self.sandbox.start_source(SERVER)
        try:
            text = _run(process, str(parameters["code"]), self.timeout_s)
        except BaseException:
            process.kill()
            raise
        if not self._keep(instance_id, process):
            process.kill()
        return ToolResponse(text=text), None, {}

    def _take(self, instance_id: str) -> SandboxedProcess | None:
        with self._lock:
            process = self._processes.get(instance_id)
            if process is not None:
                self._processes[instance_id] = None
            return process

    def _keep(self, instance_id: str, process: SandboxedProcess) -> bool:
        """False if a call at the same time has kept its own, or the conversation was cancelled and released meanwhile."""
        with self._lock:
            if self._processes.get(instance_id, process) is not None:
                return False
            self._processes[instance_id] = process
            return True

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        with self._lock:
            process = self._processes.pop(instance_id, None)
        if process is not None:
            process.kill()


def _run(process: SandboxedProcess, code: str, timeout_s: float) -> str:
    """Send the code and receive its output; RuntimeError or TimeoutError if there is none."""
    data = valid_text(code).encode()
    try:
        reply = process.ask(len(data).to_bytes(8, "big") + data, timeout_s, lambda reply: len(reply) >= _size(reply))
    except TimeoutError:
        raise TimeoutError("the code took too long") from None
    except EOFError as error:
        process.kill()
        raise RuntimeError(f"the code ended its process: {process.error or 'exit code 0'}") from error
    return reply[8 : _size(reply)].decode(errors="replace")


def _size(reply: bytes | bytearray) -> int:
    """Bytes of the whole message, of which `reply` is the beginning."""
    size = int.from_bytes(reply[:8], "big") if len(reply) >= 8 else 0
    if size > MAX_OUTPUT_BYTES:
        raise RuntimeError("the output is too long")
    return 8 + size
