"""The search tool: over a local index, and over HTTP with a real server."""

import json
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lockstep.agents.tools.load import load_tools
from lockstep.utils.json_http import RETRIED
from tests.agents.json_server import json_server
from tests.agents.scripted import Scripted, call, converse, make_agents

PASSAGES = [
    '"Paris"\nParis is the capital of France.',
    '"Berlin"\nBerlin is the capital of Germany.',
    '"Mount Everest"\nThe highest mountain above sea level.',
]
VERL = """
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config:
      retrieval_service_url: {url}
      num_workers: 120
      rate_limit: 120
      timeout: {timeout}
      type: native
    tool_schema:
      type: function
      function:
        name: search
        description: Searches the web for relevant information based on the given query.
        parameters:
          type: object
          properties:
            query_list:
              type: array
              item:
                type: string
              description: A list of fully-formed semantic queries.
          required:
            - query_list
"""


def answer(config_path: Path, queries: Any) -> str:
    agents = make_agents(tool_config_path=str(config_path), response_length=3000, max_tool_response_length=1000)
    conversation = converse(agents, Scripted(call("search", query_list=queries), "done"))
    return conversation.new_messages[1]["content"]


def write_config(folder: Path, **config: Any) -> Path:
    path = folder / "tools.yaml"
    path.write_text(json.dumps({"tools": [{"class_name": "search", "config": config}]}))
    return path


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("bm25s")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "contents": text}) + "\n" for i, text in enumerate(PASSAGES)))
    return path


def test_a_local_index_finds_the_passages(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus=str(corpus), topk=2)
    text = answer(config, ["What is the capital of Germany?", "xyzzy"])
    assert text == (
        'Doc 1 (Title: "Berlin")\nBerlin is the capital of Germany.\n\n'
        'Doc 2 (Title: "Paris")\nParis is the capital of France.\n---\nNo results.'
    )
    assert answer(config, "highest mountain").startswith('Doc 1 (Title: "Mount Everest")')
    assert answer(config, []) == "Error: query_list must be a list of texts"
    assert answer(config, ["a"] * 9) == "Error: query_list has 9 queries, at most 8 are allowed"


def test_the_index_is_kept_until_the_corpus_changes(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_config(tmp_path, corpus=str(corpus), index_dir=str(tmp_path / "index"))
    for _ in range(2):
        load_tools(str(config), None)
    assert caplog.text.count("indexed 3 passages") == 1
    assert "bm25s" not in {record.name for record in caplog.records}
    corpus.write_text(json.dumps({"title": "Rome", "text": "Rome is the capital of Italy."}) + "\n")
    assert answer(config, ["capital"]) == "Doc 1 (Title: Rome)\nRome is the capital of Italy."
    pd.DataFrame({"contents": PASSAGES}).to_parquet(tmp_path / "corpus.parquet")
    config = write_config(tmp_path, corpus=[str(tmp_path / "corpus.parquet")], topk=1)
    assert answer(config, ["France"]) == 'Doc 1 (Title: "Paris")\nParis is the capital of France.'


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "corpus.json").write_text("[]")
    config = write_config(tmp_path, corpus=str(corpus), index_dir=str(folder))
    with pytest.raises(ValueError, match=r"config.index_dir=.*mine: is not empty and no index; give a new folder"):
        load_tools(str(config), None)
    assert (folder / "corpus.json").read_text() == "[]"
    (folder / "corpus.json").unlink()
    assert "Berlin" in answer(config, ["Germany"])  # an empty folder is fine


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "needs either config.retrieval_service_url or config.corpus"),
        ({"corpus": "no/such.jsonl"}, "config.corpus=no/such.jsonl: no such file"),
        ({"retrieval_service_url": "http://x", "top_k": 3}, "has no setting top_k; known: retrieval_service_url"),
        ({"retrieval_service_url": "http://x", "topk": 0}, "config.topk must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_with_their_key(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    pytest.importorskip("bm25s")
    with pytest.raises(ValueError, match=message) as error:
        load_tools(str(write_config(tmp_path, **config)), None)
    assert str(error.value).startswith("actor_rollout_ref.rollout.multi_turn.tool_config_path=")


def test_a_corpus_without_passages_is_refused_and_leaves_no_index(tmp_path: Path, corpus: Path) -> None:
    corpus.write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match="row 0: has neither `contents` nor `text`"):
        load_tools(str(write_config(tmp_path, corpus=str(corpus))), None)
    assert [path.suffix for path in (tmp_path / "cache" / "search").iterdir()] in ([], [".lock"])


def test_a_retrieval_server_is_asked_and_asked_again(tmp_path: Path) -> None:
    statuses = [503, 429, 200]

    def retrieve(body: dict[str, Any]) -> tuple[int, Any]:
        found = [[{"document": {"id": "0", "contents": PASSAGES[0]}, "score": 7.5}] for _ in body["queries"]]
        return statuses.pop(0), {"result": found}

    with json_server(retrieve) as server:
        config = tmp_path / "tools.yaml"
        config.write_text(VERL.format(url=f"{server.url}/retrieve", timeout=30))
        assert answer(config, ["capital of France"]) == 'Doc 1 (Title: "Paris")\nParis is the capital of France.'
        body = {"path": "/retrieve", "queries": ["capital of France"], "topk": 3, "return_scores": True}
        assert server.requests == [body] * 3


@pytest.mark.parametrize(
    "status, reply, message",
    [
        (404, "no such page", r"Error: the search failed: http.*/retrieve: status 404: no such page"),
        (200, "<html>", "Error: the search failed: .*the answer is not JSON"),
        (200, {"results": []}, "Error: the search server's answer has no list of passages per query: KeyError"),
        (200, {"result": [None]}, "Error: the search server's answer has no list of passages per query"),
    ],
)
def test_an_unusable_answer_is_an_error_message(tmp_path: Path, status: int, reply: Any, message: str) -> None:
    import re

    assert status not in RETRIED
    with json_server(lambda body: (status, reply)) as server:
        config = tmp_path / "tools.yaml"
        config.write_text(VERL.format(url=f"{server.url}/retrieve", timeout=30))
        assert re.match(message, answer(config, ["q"]))
        assert len(server.requests) == 1


def test_a_server_that_hangs_or_is_gone_costs_the_deadline(tmp_path: Path) -> None:
    def hang(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(3)
        return 200, {}

    config = tmp_path / "tools.yaml"
    with json_server(hang) as server:
        config.write_text(VERL.format(url=f"{server.url}/retrieve", timeout=0.4))
        started = time.monotonic()
        assert "no answer within 0.4 s" in answer(config, ["q"])
        assert time.monotonic() - started < 2
    config.write_text(VERL.format(url="http://127.0.0.1:9/retrieve", timeout=0.4))
    assert "127.0.0.1:9/retrieve: no answer within 0.4 s (ConnectError" in answer(config, ["q"])
