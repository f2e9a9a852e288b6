"""What a run waits for, by the name that a user knows; the watchdog reads it."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from lockstep.agents.loops.recorded import OwnTime
from lockstep.agents.tools.calls import run_contained
from lockstep.config.actor_rollout_ref import ServerConfig
from lockstep.config.reward import JudgeConfig
from lockstep.data.loader import create_dataloader
from lockstep.engines.rollout.server.http import Connection
from lockstep.observability.jsonl import JsonlFile
from lockstep.registry import load_object
from lockstep.rewards.calls import make_caller
from lockstep.rewards.model_judge import Judge
from lockstep.rewards.rate_limit import RateLimiter, RateLimits
from lockstep.utils.files import atomic_writer
from lockstep.utils.progress import Wait, waits
from tests.judge_server import serve, verdict

ROW = {"data_source": "d", "solution_str": "s", "ground_truth": "g", "extra_info": {}}
REWARD = """
import asyncio, time

def score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.3)
    return 1.0

async def score_later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.3)
    return 1.0
"""


def seen_during(call: Callable[[], object]) -> list[Wait]:
    """What is waited for at some time while `call` runs."""
    seen: dict[tuple[str, str, float], Wait] = {}
    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        seen |= {(wait.kind, wait.name, wait.began): wait for wait in waits()}
        time.sleep(0.01)
    thread.join()
    assert waits() == []
    return list(seen.values())


def names(found: list[Wait]) -> set[tuple[str, str]]:
    return {(wait.kind, wait.name) for wait in found}


@pytest.mark.parametrize(
    ("function", "options", "where"),
    [
        ("score", {}, ""),
        ("score_later", {}, ""),
        ("score", {"timeout_s": 60.0}, " (pid "),
        ("score_later", {"timeout_s": 60.0}, ""),
    ],
    ids=["inline", "coroutine", "worker process", "coroutine with a limit"],
)
def test_a_reward_by_file_function_and_row(tmp_path: Path, function: str, options: Any, where: str) -> None:
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    caller = make_caller(load_object(f"{path}:{function}"), num_workers=1, **options)
    found = seen_during(lambda: caller([ROW, ROW]))
    rows = [f"{path}:{function}, row {row} of 2" for row in (0, 1)]
    for row in rows:
        assert any(wait.kind == "reward" and wait.name.startswith(row + where) for wait in found), found
    if where:
        assert any("being loaded (pid " in wait.name for wait in found)
        caller.close()  # type: ignore[attr-defined]


def test_a_reward_in_a_thread() -> None:
    caller = make_caller(lambda **row: time.sleep(0.2), timeout_s=60.0)
    assert {"reward"} == {wait.kind for wait in seen_during(lambda: caller([ROW]))}


def test_a_judge_by_its_url_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Wait] = []

    def answer(body: dict[str, Any], number: int) -> Any:
        seen.extend(waits())
        return verdict(5)

    with serve(answer) as server:
        config = JudgeConfig(enable=True, base_url=server.url, model="critic-9b")
        judge = Judge(config, RateLimiter(RateLimits()))
        make_caller(judge)([ROW])
    assert names(seen) == {("judge", f"{server.url}/chat/completions (critic-9b)")}


def test_a_tool_since_its_thread_began() -> None:
    async def start() -> list[Wait]:
        return waits()

    (wait,) = asyncio.run(run_contained("tool", "search", start, 5.0))
    assert (wait.kind, wait.name) == ("tool", "search") and waits() == []
    (wait,) = asyncio.run(run_contained("tool", "search", start, 5.0, "create"))
    assert wait.name == "search, create"


def test_a_program_unless_the_policy_answers_it() -> None:
    seen: dict[str, list[Wait]] = {}

    async def policy(request: Any) -> Any:
        seen["policy"] = waits()

    async def hold(own_time: OwnTime) -> None:
        seen["before"] = waits()
        await own_time.sample(None)  # type: ignore[arg-type]
        seen["after"] = waits()

    async def main() -> None:
        own_time = OwnTime(policy)
        await own_time.limit(hold(own_time), 5.0, "program", "python agent.py")

    asyncio.run(main())
    assert names(seen["before"]) == names(seen["after"]) == {("program", "python agent.py")}
    assert seen["policy"] == [] and waits() == []


def test_a_server_by_its_url() -> None:
    async def main(url: str) -> set[tuple[str, str]]:
        connection = Connection(url, ServerConfig())
        request = asyncio.create_task(connection.post("/generate", {}))
        await asyncio.sleep(0.1)
        found = names(waits())
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await connection.close()
        return found

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert asyncio.run(main(url)) == {("server", f"{url}/generate")}
    assert waits() == []


class SlowRows(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.2)
        return {"index": index}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_by_dataset_and_process(num_workers: int) -> None:
    loader = create_dataloader(SlowRows(), 1, shuffle=False, seed=0, num_workers=num_workers)
    found = names(seen_during(lambda: list(loader)))
    (name,) = {name for kind, name in found if kind == "data loader"}
    assert name.startswith("SlowRows, process 0 of 1 (pid " if num_workers else "SlowRows")


def test_a_file_by_its_path(tmp_path: Path) -> None:
    with atomic_writer(tmp_path / "a.json") as file:
        file.write(b"{}")
        assert names(waits()) == {("file", str(tmp_path / "a.json"))}
    lines = JsonlFile(tmp_path / "metrics.jsonl", "key")

    class Stalled:
        def write(self, data: bytes) -> int:
            assert names(waits()) == {("file", str(tmp_path / "metrics.jsonl"))}
            return len(data)

    lines._file.close()
    lines._file = Stalled()  # type: ignore[assignment]
    lines.append({"x": 1}, 1)
    assert waits() == []
