"""A row names only what the config or a registry defines: what it names is never imported, and no address of it is called."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.agents.agents import Agents
from lockstep.rewards.default import UnknownDataSourceError, choose_scorer
from tests.agents.scripted import END, TOKENIZER, make_agents

CODE = ["FOLDER/planted.py:Planted", "planted:Planted", "pkg://planted:Planted"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a module whose import leaves a marker."""
    source = f"open('{tmp_path}/marker', 'w')\nclass Planted:\n    def reset(self): ...\n    def step(self): ...\n"
    (tmp_path / "planted.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def refuses(agents: Agents, row: dict[str, Any], message: str, folder: Path) -> None:
    def episode(row: dict[str, Any]) -> None:
        agents.loop_of(row).episode(row)  # type: ignore[attr-defined]

    for use in (agents.check_row, episode):
        with pytest.raises(ValueError, match=message):
            use(row)
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("name", [*CODE, "python://Planted", ["tool_agent"]])
def test_agent_name(folder: Path, name: Any) -> None:
    row = {"agent_name": name.replace("FOLDER", str(folder)) if isinstance(name, str) else name}
    message = r"agent_name=.*: no such agent loop\..* an entry of .*agent_loop_config_path, with its `_target_`"
    refuses(make_agents(), row, message, folder)
    with pytest.raises(ValueError, match=message):
        make_agents().tools_of(row)


@pytest.mark.parametrize("is_column", [False, True])
@pytest.mark.parametrize("name", CODE)
def test_env_class(folder: Path, name: str, is_column: bool) -> None:
    named = {"env_class": name.replace("FOLDER", str(folder))}
    row = {"agent_name": "gym_agent", **(named if is_column else {"extra_info": named})}
    refuses(make_agents(), row, r"env_class=.*: no such environment\..*agent_loop_config_path", folder)


@pytest.mark.parametrize(
    "named, message",
    [
        ({"env_class": "FOLDER/planted.py:Planted"}, "env_class=.*: no such environment"),
        (
            {"env_kwargs": {"base_url": "http://elsewhere"}},
            "env_kwargs.base_url='http://elsewhere': no such server.*base_url",
        ),
        ({"extra_info": {"env_kwargs": {"base_url": "http://elsewhere"}}}, "no such server. Known: http://127.0.0.1:9"),
    ],
)
def test_openenv(folder: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))  # openenv is not needed
    if "env_class" in named:
        named = {"env_class": named["env_class"].replace("FOLDER", str(folder))}
    (folder / "loops.yaml").write_text(
        "- {name: echo, _target_: lockstep.agents.environments.OpenEnvAgent, base_url: ['http://127.0.0.1:9']}"
    )
    refuses(make_agents(loops=str(folder / "loops.yaml")), {"agent_name": "echo", **named}, message, folder)


def test_verifiers(folder: Path) -> None:
    agents = Agents(make_agents().config, TOKENIZER, [END], data_files=["verifiers:sums?count=3", "rows.parquet"])
    loop = agents.loop_of({"agent_name": "verifiers_agent"})
    loop.check_row({"extra_info": {"verifiers": {"entry": "verifiers:sums?count=3", "index": 0}}})
    for place, message in [
        ({"entry": "verifiers:planted", "index": 0}, "entry='verifiers:planted': no such taskset.*data.train_files"),
        ({"config": {"taskset": {"id": "planted"}}, "index": 0}, "entry=None: no such taskset"),
        ({"entry": "rows.parquet", "index": 0}, "no such taskset"),
        ("planted", "answers rows of data.train_files=verifiers:TASKSET only"),
    ]:
        with pytest.raises(ValueError, match=message):
            loop.check_row({"extra_info": {"verifiers": place}})
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("name", CODE)
def test_data_source(folder: Path, name: str) -> None:
    with pytest.raises(UnknownDataSourceError, match="no scorer for data_source"):
        choose_scorer(name.replace("FOLDER", str(folder)), None)
    assert not (folder / "marker").exists()
