"""The files that docs/tools.md, docs/agents.md and docs/python_api.md show load and answer as the pages say."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.agents.interactions.load import load_interactions
from lockstep.agents.tools.function import ToolList, tools_of
from lockstep.agents.tools.load import close_tools, load_tools
from tests.agents.json_server import json_server

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the pages' files, as working directory."""
    for page in ("tools.md", "agents.md"):
        for name, content in re.findall(
            r"```(?:yaml|python)\n# ([\w.]+)\n(.*?)```", (DOCS / page).read_text(), flags=re.S
        ):
            (tmp_path / name).write_text(content)
    passages = re.findall(r'^    (\{"(?:contents|title)".*\})$', (DOCS / "tools.md").read_text(), flags=re.M)
    assert len(passages) == 2
    (tmp_path / "passages.jsonl").write_text("\n".join(passages) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def answer(tool: Any, **parameters: Any) -> str:
    response, _, _ = asyncio.run(tool.execute("", parameters))
    return str(response.text)


def test_the_mcp_server_answers(pages: Path) -> None:
    pytest.importorskip("mcp")
    tools = load_tools("mcp_tools.yaml", None)
    try:
        assert list(tools) == ["forecast"] and answer(tools["forecast"], city="Oslo") == "Oslo: rain"
    finally:
        close_tools(tools.values())


def test_the_local_index_answers(pages: Path) -> None:
    pytest.importorskip("bm25s")
    (search,) = load_tools("search_tools.yaml", None).values()
    assert answer(search, query_list=["capital of Germany"]).startswith("Doc 1 (Title: Berlin)\nBerlin is the capital")


def test_the_tools_with_servers_load(pages: Path) -> None:
    assert [*load_tools("search_server_tools.yaml", None)] == ["search"]
    assert [*load_tools("sandbox_fusion_tools.yaml", None)] == ["code_interpreter"]


def test_the_simulated_user_loads(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_MODEL_KEY", "sesame")
    file = pages / "simulated_user.yaml"
    with json_server(lambda body: (200, {"choices": [{"message": {"content": "[DONE]"}}]})) as server:
        file.write_text(file.read_text().replace("http://127.0.0.1:8000", server.url))
        user = load_interactions(str(file))["customer"]
        kwargs = {"persona": "short", "goal": "return the shoes"}
        asyncio.run(user.start_interaction("1", **kwargs))
        messages = [{"role": "assistant", "content": "You can return the shoes."}]
        assert asyncio.run(user.generate_response("1", messages)) == (True, "", 1.0, {})
    assert "You want to return the shoes." in server.requests[1]["messages"][0]["content"]


def test_the_program_with_a_class_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(lockstep, "train", lambda model, rows, **settings: given.update(settings, rows=rows))
    (program,) = re.findall(r"```python\n# guess.py\n(.*?)```", (DOCS / "python_api.md").read_text(), flags=re.S)
    exec(compile(program, "guess.py", "exec"), {})
    (guess,) = tools_of(ToolList((given["tools"],)))
    row = {"extra_info": given["rows"][7]}
    asyncio.run(guess.create("a", **guess.create_arguments(row)))
    results = [asyncio.run(guess.execute("a", {"number": number}))[0].text for number in (3, 9, 7)]
    assert results == ["too low", "too high", "right"]
    assert asyncio.run(guess.calc_reward("a")) == pytest.approx(1 / 3)
