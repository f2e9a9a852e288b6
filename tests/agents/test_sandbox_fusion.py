"""The SandboxFusion tool against a loopback server with its protocol."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.tools.load import load_tools
from tests.agents.json_server import json_server
from tests.agents.scripted import Scripted, call, converse, make_agents

VERL = """
tools:
  - class_name: "{class_name}"
    config:
      sandbox_fusion_url: "{url}/run_code"
      num_workers: 10
      enable_global_rate_limit: true
      rate_limit: 10
      default_timeout: {timeout}
      default_language: "python"
      memory_limit_mb: 1024
      type: native

    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties:
            code:
              type: "string"
              description: "The code to execute."
          required: ["code"]
"""
SANDBOX_FUSION = "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
RETOOL = "recipe.retool.retool.CustomSandboxFusionTool"


def write_config(folder: Path, url: str, class_name: str = SANDBOX_FUSION, timeout: float = 30) -> str:
    (folder / "tools.yaml").write_text(VERL.format(url=url, class_name=class_name, timeout=timeout))
    return str(folder / "tools.yaml")


def answer(config_path: str, code: str) -> str:
    agents = make_agents(tool_config_path=config_path, response_length=3000, max_tool_response_length=1000)
    conversation = converse(agents, Scripted(call("code_interpreter", code=code), "done"))
    return conversation.new_messages[1]["content"]


def run_code(body: dict[str, Any]) -> tuple[int, Any]:
    """What a SandboxFusion server does, without the sandbox: for programs of this test only."""
    done = subprocess.run([sys.executable, "-S", "-c", body["code"]], capture_output=True, text=True, timeout=20)
    run = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    status = "Success" if done.returncode == 0 else "Failed"
    return 200, {"status": status, "message": "", "compile_result": None, "run_result": run, "files": {}}


@pytest.mark.parametrize("class_name", [SANDBOX_FUSION, RETOOL])
def test_code_runs_on_the_server(tmp_path: Path, class_name: str) -> None:
    with json_server(run_code) as server:
        config = write_config(tmp_path, server.url, class_name)
        assert answer(config, "print(6 * 7)") == "42\n"
        assert server.requests == [
            {
                "path": "/run_code",
                "code": "print(6 * 7)",
                "language": "python",
                "run_timeout": 30.0,
                "compile_timeout": 30.0,
                "memory_limit_MB": 1024,
            }
        ]
        assert answer(config, "```python\nx = 'ä'\nx; x * 2\n```") == "'ää'\n"
        assert "ZeroDivisionError" in answer(config, "1 / 0")
        assert "SyntaxError" in answer(config, "def")
        assert answer(config, "raise SystemExit(3)") == "the code ended with exit code 3"


@pytest.mark.parametrize(
    "reply, expected",
    [
        ({"status": "SandboxError", "message": "no container"}, "Error: the sandbox failed: no container"),
        (
            {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "1\n", "stderr": ""}},
            "1\n\nthe code exceeded its time limit",
        ),
        ({"status": "Failed", "compile_result": {"status": "Finished", "stderr": "no main"}}, "no main"),
        (["x"], "Error: SandboxFusion answered list, not an object"),
    ],
)
def test_failures_are_messages(tmp_path: Path, reply: Any, expected: str) -> None:
    with json_server(lambda body: (200, reply)) as server:
        assert answer(write_config(tmp_path, server.url), "x") == expected


def test_the_server_is_asked_again_and_then_given_up(tmp_path: Path) -> None:
    statuses = [502, 200]
    with json_server(lambda body: (statuses.pop(0), run_code(body)[1])) as server:
        assert answer(write_config(tmp_path, server.url), "print(1)") == "1\n"
    gone = answer(write_config(tmp_path, "http://127.0.0.1:9"), "print(1)")
    assert gone.startswith("Error: the code was not run: http://127.0.0.1:9/run_code: ConnectError")


def test_at_most_rate_limit_requests_at_once(tmp_path: Path) -> None:
    import asyncio

    running, most = 0, 0

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1
        return 200, {"status": "Success", "run_result": {"stdout": "1"}}

    with json_server(slow) as server:
        config = write_config(tmp_path, server.url)
        Path(config).write_text(Path(config).read_text().replace("rate_limit: 10", "rate_limit: 2"))
        (tool,) = load_tools(config, None).values()

        async def calls() -> list[Any]:
            return await asyncio.gather(
                *(asyncio.to_thread(asyncio.run, tool.execute("", {"code": "1"})) for _ in range(6))
            )

        assert [response.text for response, _, _ in asyncio.run(calls())] == ["1"] * 6
        assert most == 2


def test_the_url_is_required(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.sandbox_fusion_url must be a URL such as .*, not 'xyz/run_code'"):
        load_tools(write_config(tmp_path, "xyz"), None)
