"""The SandboxFusion tool: runs the policy's code on a SandboxFusion server (`POST /run_code`).

For Python without a server, use the tool `python` (lockstep/agents/tools/python.py).
"""

import ast
import re
import threading
from collections.abc import Mapping
from typing import Any

from lockstep.agents.schemas import OpenAIFunctionToolSchema, ToolResponse
from lockstep.agents.tools.calls import ToolError
from lockstep.agents.tools.tool import TOOLS, BaseTool, Executed, tool_schema
from lockstep.utils.json_http import HttpError, post_json

KNOWN = (
    *("sandbox_fusion_url", "num_workers", "enable_global_rate_limit", "rate_limit", "default_timeout"),
    *("default_language", "memory_limit_mb", "type"),
)
MARGIN_S = 5.0
"""Time of a request besides that of the code: queue, container start, compilation."""
FENCE = re.compile(r"```[a-zA-Z0-9+#]*\n(.*?)```", re.DOTALL)


@TOOLS.register("sandbox_fusion")
class SandboxFusionTool(BaseTool):
    """Runs `code` and returns its stdout and stderr.

    config: `sandbox_fusion_url` (with `/run_code`), `default_timeout` (30) of the code in seconds, `default_language` (python),
    `memory_limit_mb` (1024); `rate_limit` (10) requests at once, or `num_workers` (10) with `enable_global_rate_limit: false`.
    A Markdown fence around the code is removed, and the value of a last Python expression is printed.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        if unknown := sorted(set(config) - set(KNOWN)):
            raise ValueError(f"the SandboxFusion tool has no setting {', '.join(unknown)}; known: {', '.join(KNOWN)}")
        url = config.get("sandbox_fusion_url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ValueError(f"config.sandbox_fusion_url must be a URL such as http://host:8080/run_code, not {url!r}")
        self.url = url
        self.run_timeout_s = float(config.get("default_timeout", 30.0))
        self.language = str(config.get("default_language", "python"))
        self.memory_mb = int(config.get("memory_limit_mb", 1024))
        limit = "rate_limit" if config.get("enable_global_rate_limit", True) else "num_workers"
        self._slots = threading.Semaphore(max(1, int(config.get(limit, 10))))

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        code = {"type": "string", "description": "The code; print what you need."}
        return tool_schema("code_interpreter", "Run code and return its output.", code=code)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        language = str(parameters.get("language", self.language))
        code = _without_fence(str(parameters["code"]))
        body = {
            "code": _with_last_value(code) if language == "python" else code,
            "language": language,
            "run_timeout": self.run_timeout_s,
            "compile_timeout": self.run_timeout_s,
            "memory_limit_MB": self.memory_mb,
        }
        timeout_s = self.run_timeout_s + MARGIN_S
        if not self._slots.acquire(timeout=timeout_s):  # blocks the thread of this call only
            raise ToolError("too many programs at once; try again")
        try:
            answer = await post_json(self.url, body, timeout_s=timeout_s, attempts=3)
        except HttpError as error:
            raise ToolError(f"the code was not run: {error}") from error
        finally:
            self._slots.release()
        return ToolResponse(text=_output_of(answer)), None, {}


def _without_fence(code: str) -> str:
    found = FENCE.findall(code)
    return str(found[-1]) if found else code


def _with_last_value(code: str) -> str:
    """Python code that prints the value of its last expression, as an interpreter does."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code  # the sandbox reports it
    last = body[-1] if body else None
    if not isinstance(last, ast.Expr) or (isinstance(last.value, ast.Call) and ast.unparse(last.value.func) == "print"):
        return code
    lines = code.encode().split(b"\n")
    head = b"\n".join([*lines[: last.lineno - 1], lines[last.lineno - 1][: last.col_offset]])
    return f"{head.decode()}(lambda value: value is None or print(repr(value)))({ast.unparse(last.value)})"


def _output_of(answer: Any) -> str:
    """stdout and stderr of the program, or of the compiler if it failed; ToolError if the code was not run."""
    if not isinstance(answer, Mapping):
        raise ToolError(f"SandboxFusion answered {type(answer).__name__}, not an object")
    if answer.get("status") == "SandboxError":
        raise ToolError(f"the sandbox failed: {answer.get('message') or 'no reason given'}")
    compiled, run = answer.get("compile_result") or {}, answer.get("run_result") or {}
    result = run or compiled
    text = str(result.get("stdout") or "") + str(result.get("stderr") or "")
    if result.get("status") == "TimeLimitExceeded":
        return f"{text}\nthe code exceeded its time limit".lstrip("\n")
    if not text and result.get("return_code"):
        return f"the code ended with exit code {result['return_code']}"
    return text
