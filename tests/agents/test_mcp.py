"""Tools of real MCP servers: over stdio, streamable HTTP and SSE."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.agents import Agents
from lockstep.agents.tools.load import load_tools
from lockstep.agents.tools.mcp_server import CHILD
from lockstep.protocol.generation import SamplingParams
from tests.agents.scripted import Scripted, call, converse, make_agents

pytest.importorskip("mcp")

SERVER = Path(__file__).with_name("mcp_tools_server.py")


def write_yaml(folder: Path, servers: dict[str, Any], config: dict[str, Any] | None = None, **section: Any) -> str:
    config = {"type": "mcp", **(config or {})}
    entry = {"class_name": "mcp", "config": config, "mcp": {"servers": servers, **section}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))  # JSON is YAML
    return str(folder / "tools.yaml")


def answer(agents: Agents, name: str, **arguments: Any) -> str:
    """What the policy reads after a call."""
    conversation = converse(agents, Scripted(call(name, **arguments), "done"))
    return conversation.new_messages[1]["content"]


@contextmanager
def http_server(kind: str, port: int = 0) -> Iterator[int]:
    """The same server on loopback, in a thread; its port."""
    import uvicorn

    from tests.agents.mcp_tools_server import server as tools

    app = tools.sse_app() if kind == "sse" else tools.streamable_http_app()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stdio_server_is_shared_by_conversations_and_started_again_after_its_death(tmp_path: Path) -> None:
    servers = {"t": {"command": sys.executable, "args": [str(SERVER)]}}
    agents = make_agents(tool_config_path=write_yaml(tmp_path, servers), response_length=2000, tool_timeout_s=20)
    add = agents.tools["add"].tool_schema.model_dump(exclude_unset=True)["function"]
    assert add["description"] == "Add two numbers." and add["parameters"]["required"] == ["a", "b"]
    assert add["parameters"]["properties"]["note"]["anyOf"] == [{"type": "string"}, {"type": "null"}]

    assert answer(agents, "add", a=2, b=3) == "5"
    assert answer(agents, "fail") == "Error: Error executing tool fail: no such city"
    assert answer(agents, "subtract", a=2, b=3).startswith("Error: there is no tool 'subtract'; tools: add, count")
    assert answer(agents, "add", a="x").startswith("Error: Error executing tool add: 2 validation errors")
    first = answer(agents, "count")
    assert first.startswith("1 of ")
    assert answer(agents, "count") == first.replace("1 of", "2 of")  # another conversation, the same server

    assert answer(agents, "die") == "Error: the MCP server t ended during the call"
    again = answer(agents, "count")
    assert again.startswith("1 of ") and again != first
    child = int(answer(agents, "leave_a_child"))
    assert is_alive(child)
    agents.close()
    assert not is_alive(int(again.split()[-1])) and not is_alive(child)


OLD_SERVER = """
import json, sys

TOOL = {"name": "greet", "description": "Greet.", "inputSchema": {"type": "object"}}
for line in sys.stdin:
    request = json.loads(line)
    method, number = request["method"], request.get("id")
    if number is None:
        continue
    results = {
        "initialize": {
            "protocolVersion": "2024-11-05", "capabilities": {"tools": {}}, "serverInfo": {"name": "old", "version": "1"}
        },
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "image", "data": "", "mimeType": "image/png"}] if "png" in line
                       else [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]},
    }
    answer = {"result": results[method]} if method in results else {"error": {"code": -32601, "message": "unknown"}}
    print(json.dumps({"jsonrpc": "2.0", "id": number, **answer}), flush=True)
"""


def test_a_server_of_an_earlier_protocol_version(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(OLD_SERVER)
    servers = {"old": {"command": sys.executable, "args": ["-S", str(tmp_path / "server.py")]}}
    agents = make_agents(tool_config_path=write_yaml(tmp_path, servers), response_length=2000)
    assert answer(agents, "greet") == "hello\nyou"
    assert answer(agents, "greet", kind="png") == "Error: the tool returned image; only text is supported"
    agents.close()


@pytest.mark.parametrize("kind", ["http", "sse"])
def test_a_server_over_http(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TOKEN", "secret")
    with http_server(kind) as port:
        address = {"url": f"http://127.0.0.1:{port}/{'sse' if kind == 'sse' else 'mcp'}", "auth_token": "${MCP_TOKEN}"}
        servers = {"t": {**address, "type": "sse"} if kind == "sse" else address}
        config = write_yaml(tmp_path, servers, {"timeout": 3, "connect_timeout": 20})
        agents = make_agents(tool_config_path=config, response_length=2000, tool_timeout_s=20)
        assert asyncio.run(_hang_and_add(agents)) == ["Error: the call took too long: more than 3 s", *["5"] * 8]
        if kind == "sse":
            agents.close()
            return
        with pytest.raises(ValueError, match="tool_selected_list: no server offers weather; offered: add, count"):
            load_tools(write_yaml(tmp_path, servers, tool_selected_list=["add", "weather"]), None)
        (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
        verl = {"mcp_servers_config_path": str(tmp_path / "servers.json"), "tool_selected_list": ["count"]}
        entry = {"class_name": "verl.tools.mcp_search_tool.MCPSearchTool", "mcp": verl}
        entry["config"] = {"rate_limit": 120, "timeout": 120, "type": "mcp"}
        (tmp_path / "verl.yaml").write_text(json.dumps({"tools": [entry]}))
        (only,) = load_tools(str(tmp_path / "verl.yaml"), None).values()
        assert only.name == "count"
        only.close()
    gone = answer(agents, "add", a=2, b=3)
    assert gone.startswith("Error: ") and ("cannot be reached" in gone or "ended during the call" in gone)
    with http_server(kind, port):
        time.sleep(1.0)  # the pause after a failed connection
        assert answer(agents, "add", a=2, b=3) == "5"
        agents.close()


async def _hang_and_add(agents: Agents) -> list[str]:
    """A call that hangs, and others at the same time."""
    row = {"raw_prompt": [{"role": "user", "content": "Q"}], "agent_name": "tool_agent"}
    prompt = agents.renderer.ids(row["raw_prompt"], agents.tools_of(row))
    policies = [Scripted(call("hang"), "x"), *(Scripted(call("add", a=2, b=3), "x") for _ in range(8))]
    async with agents.running():
        found = await asyncio.gather(
            *(agents.converse(row, prompt, policy, SamplingParams(max_tokens=2000), seed=7) for policy in policies)
        )
    return [conversation.new_messages[1]["content"] for conversation in found]


@pytest.mark.parametrize(
    "servers, message",
    [
        ({"t": {"url": "http://127.0.0.1:9/mcp"}}, r"t cannot be reached \(http://127.0.0.1:9/mcp\): ConnectError"),
        ({"t": {"command": "false"}}, r"t cannot be reached \(false\)"),
        (
            {"t": {"command": sys.executable, "args": ["-c", "raise SystemExit('no key')"]}},
            "its stderr ends with: no key",
        ),
        ({"t": {"command": "no-such-program"}}, "there is no program 'no-such-program'"),
        ({"t": {"command": "false", "url": "x"}}, "unknown url; a stdio server has command, args, env, cwd"),
        ({"t": {"args": []}}, "unknown args; a http server has url"),
        ({"t": {"type": "smoke", "url": "x"}}, "type=smoke; allowed: stdio, http, sse"),
        ({"t": {"url": "x", "auth_token": "${NO_SUCH_KEY}"}}, "t: the environment variable NO_SUCH_KEY is not set"),
        ({}, "mcp names no servers: set mcp.mcp_servers_config_path or mcp.servers"),
    ],
)
def test_wrong_servers_are_refused_with_their_key(tmp_path: Path, servers: dict[str, Any], message: str) -> None:
    path = write_yaml(tmp_path, servers)
    with pytest.raises(ValueError, match=message) as error:
        load_tools(path, None)
    assert str(error.value).startswith(f"actor_rollout_ref.rollout.multi_turn.tool_config_path={path}, tools[0]: ")


def test_errors_do_not_show_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TOKEN", "s3cret")
    for server in ({"command": "false", "args": ["--key", "${MCP_TOKEN}"]}, {"url": "http://127.0.0.1:9/${MCP_TOKEN}"}):
        with pytest.raises(ValueError, match=r"cannot be reached \(.*\$\{MCP_TOKEN\}\)") as error:
            load_tools(write_yaml(tmp_path, {"t": server}), None)
        assert "s3cret" not in str(error.value)


def test_limits_must_be_above_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.rate_limit=0: must be above 0"):
        load_tools(write_yaml(tmp_path, {"t": {"command": "false"}}, {"rate_limit": 0}), None)


def test_a_server_that_does_not_answer_is_refused_and_ended(tmp_path: Path) -> None:
    servers = {"t": {"command": "sh", "args": ["-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"]}}
    with pytest.raises(ValueError, match="no answer within 1 s"):
        load_tools(write_yaml(tmp_path, servers, {"connect_timeout": 1}), None)
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's death on Linux only")
def test_a_server_that_ignores_its_stdin_ends_with_the_run(tmp_path: Path) -> None:
    source = (
        "import os, subprocess, sys, time\n"
        "command = 'sleep 600 & echo $$ $! > pids; wait'\n"
        f"subprocess.Popen([sys.executable, {CHILD!r}, str(os.getpid()), 'sh', '-c', command], start_new_session=True)\n"
        "time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-S", "-c", source], cwd=tmp_path)
    try:
        while not (tmp_path / "pids").exists() or not (text := (tmp_path / "pids").read_text()):
            time.sleep(0.02)
        pids = [int(pid) for pid in text.split()]
        assert all(is_alive(pid) for pid in pids)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)
