"""The built-in tools, tools from Python, and how tools are loaded."""

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.interactions import INTERACTIONS
from lockstep.agents.interactions.load import VERL_INTERACTIONS
from lockstep.agents.tools import TOOLS, calls
from lockstep.agents.tools.calculator import calculate
from lockstep.agents.tools.load import VERL_TOOLS, load_tools
from lockstep.protocol.generation import SamplingParams
from tests.agents.scripted import Scripted, call, converse, make_agents, sampled_texts


@pytest.mark.parametrize(
    "expression, value",
    [("2+3*4", "14"), ("(47*85)", "3995"), ("7/2", "3.5"), ("6/2", "3"), ("-2**3", "-8"), ("7//2 + 7%4", "6")],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression, message",
    [
        ("1/0", "division by zero"),
        ("9**9**9", "too large"),
        ("2 +", "not an arithmetic expression"),
        ("__import__('os')", "only numbers"),
        ("(-8)**0.5", "not a finite real number"),
        ("'a'*99", "only numbers"),
        ("1" * 201, "at most 200"),
        ("1e308*10", "not a finite|too large"),
        ("(" * 150, "not an arithmetic expression"),
    ],
)
def test_calculator_refuses(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calculate(expression)


@pytest.mark.parametrize("name", [name for name in {**VERL_TOOLS, **VERL_INTERACTIONS} if name.startswith("verl.")])
def test_classes_of_verl_have_the_same_place_in_the_shim(name: str) -> None:
    module, _, attribute = f"lockstep.{name}".rpartition(".")
    ours = TOOLS.get(VERL_TOOLS[name]) if name in VERL_TOOLS else INTERACTIONS.get(VERL_INTERACTIONS[name])
    assert issubclass(getattr(importlib.import_module(module), attribute), ours)


def write_yaml(folder: Path, entry: str) -> str:
    (folder / "tools.yaml").write_text(f"tools:\n  - {entry}\n")
    return str(folder / "tools.yaml")


@pytest.fixture
def python_tool(tmp_path: Path) -> str:
    return write_yaml(tmp_path, "{class_name: python, config: {timeout_s: 3, memory_mb: 256, processes: 8}}")


def test_code_keeps_its_state_only_if_asked_to(tmp_path: Path) -> None:
    turns = (call("python", code="x = 6\nprint('set')"), call("python", code="x * 7"), "done")
    fresh = converse(make_agents(tool_config_path=write_yaml(tmp_path, "{class_name: python}")), Scripted(*turns))
    assert [m["content"] for m in fresh.new_messages[1::2]] == ["set\n", "NameError: name 'x' is not defined (line 1)"]
    kept = write_yaml(tmp_path, "{class_name: python, config: {keep_state: true}}")
    agents = make_agents(tool_config_path=kept)
    assert [m["content"] for m in converse(agents, Scripted(*turns)).new_messages[1::2]] == ["set\n", "42\n"]
    other = converse(agents, Scripted(call("python", code="x"), "done"))  # state is private to its conversation
    assert "NameError" in other.new_messages[1]["content"]


def test_a_call_that_outlives_its_conversation_keeps_no_process(tmp_path: Path) -> None:
    agents = make_agents(tool_config_path=write_yaml(tmp_path, "{class_name: python, config: {keep_state: true}}"))
    tool: Any = agents.tools["python"]

    async def main() -> list[str]:
        instance_id, _ = await tool.create("one")
        text = (await tool.execute(instance_id, {"code": "x = 1"}))[0].text
        await tool.release(instance_id)  # of a cancelled conversation, while its thread is still in the next call
        return [text, (await tool.execute(instance_id, {"code": "x"}))[0].text]

    assert "NameError" in asyncio.run(main())[1] and tool._processes == {}


ATTACKS = {
    "open('/etc/shadow').read()": "Error",
    "import socket; socket.create_connection(('1.1.1.1', 80), 1)": "Error",
    "while True: pass": "too long",
    "x = bytearray(10**10)": "MemoryError",
    "import os\nwhile True: os.fork()": "",
    "import os; os.write(1, b'x' * 100); os.kill(os.getpid(), 9)": "ended its process",
    "open('f', 'wb').write(b'0' * 10**9)": "",
    "import os; os._exit(0)": "ended its process",
    "print('a' * 10**8)": "truncated",
    "import os\nfor fd in range(3, 100):\n  try: os.write(fd, b'\\xff' * 64)\n  except OSError: pass": "",
}


def test_attacks_through_the_code_tool_cost_their_conversation_only(python_tool: str) -> None:
    agents = make_agents(tool_config_path=python_tool, response_length=2000)

    async def one(code: str) -> Any:
        row = {"raw_prompt": [{"role": "user", "content": "Q"}], "agent_name": "tool_agent"}
        policy = Scripted(call("python", code=code), "next")
        sampling = SamplingParams(max_tokens=2000)
        return await agents.converse(row, [1, 2], policy, sampling, 0)

    async def all_at_once() -> list[Any]:
        async with agents.running():
            return await asyncio.gather(*(one(code) for code in [*ATTACKS, *["print(6 * 7)"] * 3]))

    *attacks, a, b, c = asyncio.run(all_at_once())
    for conversation in (a, b, c):
        assert conversation.new_messages[1]["content"] == "42\n"
    for conversation, (code, expected) in zip(attacks, ATTACKS.items()):
        assert expected in conversation.new_messages[1]["content"], (code, conversation.new_messages[1])
        assert len(conversation.new_messages[1]["content"]) < 300
        assert sampled_texts(conversation)[-1] == "next<|im_end|>"


def test_gsm8k_tool_checks_the_answer(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "{class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {type: native}}")
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "9"}}}
    turns = [call("calc_gsm8k_reward", answer=answer) for answer in ("8", "9")]
    done = converse(make_agents(tool_config_path=path), Scripted(*turns, "#### 9"), tools_kwargs=kwargs)
    assert done.tool_rewards == [-0.05, 0.0]
    assert done.reward_scores == {"calc_gsm8k_reward": 1.0}


ENVIRONMENT = '''
class Counter:
    def reset(self, start: int = 0) -> None:
        self.value = start

    def increase(self, by: int) -> int:
        """Increase the counter.

        Args:
            by: How much.
        """
        self.value += by
        return self.value

    def read(self) -> int:
        """Read the counter."""
        return self.value

    def get_reward(self) -> float:
        return float(self.value == 5)
'''


def test_the_methods_of_a_class_are_the_tools_of_a_conversation(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    agents = make_agents(function_tool_path=f"{tmp_path}/env.py:Counter")
    assert sorted(agents.tools) == ["increase", "read"]
    for _ in range(2):  # each conversation has its own counter
        done = converse(agents, Scripted(call("increase", by=3), call("increase", by=2), call("read"), "5"))
        assert [m["content"] for m in done.new_messages[1::2]] == ["3", "5", "5"]
        assert sum(done.reward_scores.values()) == 1.0


def test_an_environment_is_reset_with_the_rows_fields(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    agents = make_agents(function_tool_path=f"{tmp_path}/env.py:Counter")
    row = {"extra_info": {"start": 7, "other": 1}, "reward_model": {"ground_truth": "5"}}
    assert converse(agents, Scripted(call("read"), "x"), **row).new_messages[1]["content"] == "7"
    kwargs = {"read": {"create_kwargs": {"start": 8}}}
    done = converse(agents, Scripted(call("read"), "x"), tools_kwargs=kwargs, **row)
    assert done.new_messages[1]["content"] == "8"
    everything = "class All:\n    def reset(self, **fields):\n        self.fields = fields\n\n"
    read = '    def read(self) -> dict:\n        """Read."""\n        return sorted(self.fields)\n'
    (tmp_path / "env.py").write_text(everything + read)
    done = converse(make_agents(function_tool_path=f"{tmp_path}/env.py:All"), Scripted(call("read"), "x"), **row)
    assert done.new_messages[1]["content"] == '["data_source", "ground_truth", "other", "prompt", "start"]'


@pytest.mark.parametrize("order", [("read", "increase"), ("increase", "read"), ("read",)])
def test_the_reward_of_a_class_does_not_depend_on_which_methods_were_called(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    agents = make_agents(function_tool_path=f"{tmp_path}/env.py:Counter")
    calls = {"read": call("read"), "increase": call("increase", by=0)}
    kwargs = {name: {"create_kwargs": {"start": 5}} for name in calls}
    done = converse(agents, Scripted(*(calls[name] for name in order), "5"), tools_kwargs=kwargs)
    assert [message["content"] for message in done.new_messages[1::2]] == ["5"] * len(order)
    assert sum(done.reward_scores.values()) == 1.0


def test_coroutines_of_a_class_are_awaited(tmp_path: Path) -> None:
    source = ENVIRONMENT
    for name in ("reset", "read", "get_reward"):
        source = source.replace(f"def {name}", f"async def {name}")
    (tmp_path / "env.py").write_text(source)
    agents = make_agents(function_tool_path=f"{tmp_path}/env.py:Counter")
    done = converse(agents, Scripted(call("read"), call("increase", by=1), "5"), extra_info={"start": 4})
    assert [m["content"] for m in done.new_messages[1::2]] == ["4", "5"]
    assert sum(done.reward_scores.values()) == 1.0 and done.counts.tool_errors == 0


COUNTED = '''
import time

class Counted:
    resets = 0

    def reset(self) -> None:
        time.sleep(0.05)
        Counted.resets += 1

    def number_of_resets(self) -> int:
        """How often a conversation began."""
        return Counted.resets
'''


def test_calls_of_one_turn_begin_one_conversation(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(COUNTED)
    agents = make_agents(function_tool_path=f"{tmp_path}/env.py:Counted", max_parallel_calls=4)
    done = converse(agents, Scripted(4 * call("number_of_resets"), "1"))
    assert [message["content"] for message in done.new_messages[1:-1]] == ["1"] * 4


@pytest.mark.parametrize(
    "text, message",
    [
        ("tools: 3", "must have a list `tools`"),
        ("tools: [{class_name: calculater}]", r"tools\[0\]: .*Did you mean 'calculator'"),
        ("tools: [{config: {}}]", "class_name must be text"),
        ("tools: [{class_name: no.such.Tool}]", "No module named"),
        ("tools: [{class_name: json.JSONDecoder}]", "must be a subclass of .*BaseTool"),
        ("tools: [{class_name: calculator}, {class_name: calculator}]", "two tools are named 'calculator'"),
        ("tools: [{class_name: python, config: {time: 3}}]", "has no setting time"),
        (
            "tools: [{class_name: calculator, config: {type: mcp}}]",
            "config.type=mcp does not fit class_name=calculator",
        ),
        ("tools: [", "not valid YAML"),
    ],
)
def test_a_wrong_tool_file_is_refused_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tools(str(tmp_path / "tools.yaml"), None)


def test_wrong_functions_are_refused_with_their_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"multi_turn\.tool_config_path=.*: no such file"):
        load_tools(str(tmp_path / "none.yaml"), None)
    (tmp_path / "bad.py").write_text("def undocumented(x: int) -> int:\n    return x\n")
    with pytest.raises(ValueError, match=r"function_tool_path=.*undocumented .*cannot be a tool.*docstring"):
        load_tools(None, str(tmp_path / "bad.py"))
    (tmp_path / "empty.py").write_text("X = 1\n")
    with pytest.raises(ValueError, match="defines no public functions"):
        load_tools(None, str(tmp_path / "empty.py"))


def test_only_methods_that_a_tool_defines_cost_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    run_in_thread = calls.run_in_thread

    async def counted(start: Any, timeout_s: float) -> Any:
        started.append(start)
        return await run_in_thread(start, timeout_s)

    monkeypatch.setattr(calls, "run_in_thread", counted)
    agents = make_agents(tool_config_path=write_yaml(tmp_path, "class_name: calculator"))
    done = converse(agents, Scripted(call("calculator", expression="2+3"), call("calculator", expression="5*2"), "10"))
    assert [m["content"] for m in done.new_messages if m["role"] == "tool"] == ["5", "10"]
    assert len(started) == 2
