"""Which loop serves a row: names, classes, files, the YAML of loops; and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.conversation import Conversation
from lockstep.agents.loops import AGENT_LOOPS, AgentLoop, Setup, register
from tests.agents.scripted import Scripted, converse, make_agents, roles

LOOP = """
from lockstep.agents.loops import AgentLoop

class Asks(AgentLoop):
    def __init__(self, setup, times=1):
        super().__init__(setup)
        self.times = times

    async def run(self, conversation):
        await conversation.generate()
        for _ in range(self.times):
            if conversation.add([{"role": "user", "content": "again"}]):
                await conversation.generate()
"""


@pytest.fixture
def loop_file(tmp_path: Path) -> Path:
    (tmp_path / "asks.py").write_text(LOOP)
    return tmp_path / "asks.py"


@pytest.mark.parametrize("names_it", [False, True])
def test_the_default_loop_can_be_a_file(loop_file: Path, names_it: bool) -> None:
    agents = make_agents(loop=f"{loop_file}:Asks")
    done = converse(agents, Scripted("a", "b"), agent_name=f"{loop_file}:Asks" if names_it else "")
    assert roles(done.new_messages) == ["assistant", "user", "assistant"]
    with pytest.raises(ValueError, match="default_agent_loop=json:JSONDecoder: must be a subclass of"):
        make_agents(loop="json:JSONDecoder").check_row({})


def test_a_loop_can_be_an_entry_with_options(loop_file: Path) -> None:
    (loop_file.parent / "loops.yaml").write_text(f"- {{name: asks, _target_: '{loop_file}:Asks', times: 2}}\n")
    agents = make_agents(loops=str(loop_file.parent / "loops.yaml"))
    assert len(converse(agents, Scripted("a", "b", "c"), agent_name="asks").new_messages) == 5
    (loop_file.parent / "loops.yaml").write_text(f"- {{name: asks, _target_: '{loop_file}:Asks', tries: 2}}\n")
    with pytest.raises(ValueError, match=r"agent_name=asks: .*tries"):
        make_agents(loops=str(loop_file.parent / "loops.yaml")).loop_of({"agent_name": "asks"})
    (loop_file.parent / "loops.yaml").write_text("- {name: asks}\n")
    with pytest.raises(ValueError, match="must have `name` and `_target_`"):
        make_agents(loops=str(loop_file.parent / "loops.yaml"))


def test_a_loop_can_be_registered() -> None:
    @register("once_for_this_test")
    class Once(AgentLoop):
        async def run(self, conversation: Conversation) -> None:
            await conversation.generate()

    try:
        assert converse(make_agents(), Scripted("a"), agent_name="once_for_this_test").num_turns == 2
    finally:
        del AGENT_LOOPS._entries["once_for_this_test"]
    with pytest.raises(TypeError, match="Once has no option x"):
        Once(Setup(make_agents().config, make_agents().renderer), x=1)


def test_single_turn_is_the_default() -> None:
    done = converse(make_agents(), Scripted("a"), agent_name="")
    assert (done.num_turns, done.finish_reason, sum(done.trajectory.response_mask)) == (2, "stop", 2)


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"agent_name": "tool_agnt"},
            r"agent_name='tool_agnt': no such agent loop. Did you mean 'tool_agent'\? Known: ",
        ),
        ({"agent_name": "tool_agent"}, "needs tools or an interaction"),
        ({"tools_kwargs": {"calc": {}}}, "has tools_kwargs, but its loop single_turn_agent"),
        ({"interaction_kwargs": {"name": "gsm8k"}}, "has interaction_kwargs, but its loop single_turn_agent"),
        ({"extra_info": {"need_tools_kwargs": True}}, "has need_tools_kwargs"),
    ],
)
def test_rows_that_cannot_be_served_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_agents().check_row(row)


def test_unknown_tools_of_a_row_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: calculator}]")
    agents = make_agents(tool_config_path=str(tmp_path / "tools.yaml"))
    agents.check_row({"agent_name": "tool_agent", "tools_kwargs": {"calculator": {}}})
    with pytest.raises(ValueError, match="tools_kwargs has search, but the tools are calculator"):
        agents.check_row({"agent_name": "tool_agent", "tools_kwargs": {"search": {}}})
    assert agents.tools_of({"agent_name": "tool_agent"})[0]["function"]["name"] == "calculator"  # type: ignore[index]
    assert agents.tools_of({}) is None


def test_a_loop_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text(
        LOOP.split("    async def run")[0] + "    async def run(self, c):\n        pass\n"
    )
    with pytest.raises(ValueError, match="ended without a turn"):
        converse(make_agents(loop=f"{tmp_path}/mute.py:Asks"), Scripted(), agent_name="")
