"""Programs judged on a SandboxFusion server; a loopback server with its protocol runs them without isolation."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.config.reward import SandboxFusionConfig
from lockstep.rewards.sandbox import SandboxError, fusion
from lockstep.rewards.scorers.prime_code import compute_score, compute_scores
from tests.agents.json_server import JsonServer, json_server

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADD = "print(sum(map(int, input().split())))"


def run_code(body: dict[str, Any]) -> tuple[int, Any]:
    command = [sys.executable, "-S", "-c", body["code"]]
    try:
        done = subprocess.run(command, input=body["stdin"], capture_output=True, text=True, timeout=body["run_timeout"])
    except subprocess.TimeoutExpired:
        return 200, {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}
    run = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    return 200, {"status": "Success" if done.returncode == 0 else "Failed", "message": "", "run_result": run}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JsonServer]:
    with json_server(run_code) as server:
        use(monkeypatch, f"{server.url}/run_code")
        yield server


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(fusion.VARIABLE, "")  # so that what `configure` sets is undone
    fusion.configure(SandboxFusionConfig(url=url, max_concurrent=2, memory_limit_mb=512))


@pytest.mark.parametrize(
    "program, tests, score",
    [
        (ADD, SUM, 1.0),
        ("print(3)", SUM, 0.5),
        ("def f(a):\n    return [a, 'ä']", {"inputs": [[1]], "outputs": [[1, "ä"]], "fn_name": "f"}, 1.0),
        ("def f(a):\n    return a", {"test_list": ["assert f(1) == 1", "assert f(2) == 3"]}, 0.5),
        ("import os; os.kill(os.getppid(), 9)", SUM, 0.0),
    ],
)
def test_programs_are_judged_on_the_server(server: JsonServer, program: str, tests: Any, score: float) -> None:
    assert compute_score(program, tests, continuous=True)[0] == score
    (request,) = server.requests
    assert request["language"] == "python" and request["memory_limit_MB"] == 512
    assert all(json.dumps(output) not in request["code"] for output in tests.get("outputs", []))


def test_many_programs(server: JsonServer) -> None:
    assert [score for score, _ in compute_scores([ADD] * 4, [SUM] * 4)] == [1.0] * 4


def test_a_hanging_program_costs_its_time(server: JsonServer) -> None:
    _, verdicts = compute_score("while True: pass", SUM, test_timeout_s=0.3)
    assert [verdict["error"] for verdict in verdicts] == ["took longer than 0.3 s"]


@pytest.mark.parametrize(
    "answer, message",
    [
        ((400, "no such language"), "status 400: no such language"),
        ((200, {"status": "SandboxError", "message": "no container", "run_result": {}}), "no container"),
        ((200, ["x"]), "did not run the program"),
    ],
)
def test_a_server_that_fails_scores_no_program_0(
    answer: tuple[int, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with json_server(lambda body: answer) as server:
        use(monkeypatch, server.url)
        with pytest.raises(SandboxError, match=rf"reward_model\.sandbox_fusion\.url: .*{message}"):
            compute_score(ADD, SUM)


def test_a_stopped_or_unreadable_program_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [{"status": "TimeLimitExceeded"}, {"status": "Finished", "stdout": "not base64!"}]
    with json_server(lambda body: (200, {"status": "Failed", "run_result": results.pop(0)})) as server:
        use(monkeypatch, server.url)
        assert compute_score(ADD, SUM)[1] == [{"passed": False, "error": "took too long"}]
        assert compute_score(ADD, SUM)[1] == [{"passed": False, "error": "its output cannot be read"}]


def test_the_url_is_checked_and_null_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"reward_model\.sandbox_fusion\.url=host:8080: must be a URL"):
        use(monkeypatch, "host:8080")
    fusion.configure(SandboxFusionConfig())
    assert fusion.settings() is None
