"""Training runs whose conversations are held by agent workers: the same results, also if one dies; stops, asynchronous modes."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.trainer.main_ppo import main
from tests.trainer.test_agents import run

pytestmark = [pytest.mark.first, pytest.mark.usefixtures("no_registrations")]

WORKERS = "actor_rollout_ref.rollout.agent.num_workers"
LOOP = """
import asyncio, os, signal
from pathlib import Path

from lockstep.agents.loops import AgentLoop

HERE = Path(__file__).parent

class TwoTurns(AgentLoop):
    '''Turns of one token each: every token ends a turn, since the untrained model ends none.'''

    async def run(self, conversation):
        index = conversation.row["extra_info"]["index"]
        (HERE / "pids" / str(os.getpid())).touch()
        await conversation.generate(stop_token_ids=range(259))
        for name, pid, number in (("kill", os.getpid(), signal.SIGKILL), ("stop", os.getppid(), signal.SIGTERM)):
            order = HERE / f"{name}{index}"
            if order.exists():  # once
                order.unlink()
                os.kill(pid, number)
        if (HERE / "fail").exists() and index == 3:
            raise ValueError("the row has no color")
        if (HERE / "slow").exists() and index % 2:
            await asyncio.sleep(2)
        conversation.turn_scores.append(0.5)
        if conversation.add([{"role": "user", "content": "again"}]):
            await conversation.generate(stop_token_ids=range(259))
"""


@pytest.fixture
def arguments(overrides: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "pids").mkdir()
    return [
        *overrides,
        "data.max_response_length=60",
        "data.shuffle=false",
        "trainer.save_freq=0",
        "trainer.val_before_train=false",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/loop.py:TwoTurns",
    ]


def pids(folder: Path) -> set[int]:
    return {int(path.name) for path in (folder / "pids").iterdir()}


def assert_ended(pids: set[int]) -> None:
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def comparable(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not depend on times, nor on which requests were decoded together: the rollout's log-probs do, by 1e-7."""
    others = ("time", "timing", "perf/", "training/rollout_", "training/agent_workers_replaced")
    return [{name: value for name, value in step.items() if not name.startswith(others)} for step in steps]


@pytest.mark.slow
def test_results_are_the_same_in_two_workers_one_of_which_is_killed(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two_steps = [*arguments, "trainer.total_training_steps=2", "trainer.test_freq=1"]
    steps, rollouts = run(two_steps, tmp_path / "here")
    assert pids(tmp_path) == {os.getpid()}
    (tmp_path / "kill6").touch()  # a row of the second step
    same_steps, same = run([*two_steps, f"{WORKERS}=2"], tmp_path / "workers")
    assert same == rollouts and all("again" in rollout["output"] for rollout in rollouts)
    second = "rollouts/2.jsonl"
    assert (tmp_path / "here" / second).read_text() == (tmp_path / "workers" / second).read_text()
    assert comparable(same_steps) == comparable(steps)
    assert all(step["training/rollout_probs_diff_max"] < 1e-6 for step in same_steps)
    assert all("val-core/openai/gsm8k/reward/mean@1" in step for step in steps)
    assert "was killed by SIGKILL; starting its " in caplog.text and not (tmp_path / "kill6").exists()
    workers = pids(tmp_path) - {os.getpid()}
    assert len(workers) == 3
    assert_ended(workers)


@pytest.mark.slow
def test_a_stop_in_mid_step_of_asynchronous_training_and_the_way_on(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "slow").touch()  # every other prompt: the others make up a step first
    settings = ["trainer.async_mode=colocated", f"{WORKERS}=2"]
    settings += ["trainer.total_training_steps=4", "trainer.save_freq=1", f"trainer.default_local_dir={tmp_path}/run"]
    (tmp_path / "stop13").touch()  # a prompt of the last batch, while an earlier one is generated
    assert main([*arguments, *settings]) == 130
    assert_ended(pids(tmp_path) - {os.getpid()})
    assert main([*arguments, *settings]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/pg_loss" in row]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["num_turns/mean"] == 4 for step in steps)
    assert_ended(pids(tmp_path) - {os.getpid()})


PROGRAM = """
import json, os, sys, urllib.request

messages = json.load(sys.stdin)["prompt"]
body = json.dumps({"model": "x", "messages": messages, "max_tokens": 4}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(len(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]))
"""


@pytest.mark.slow
def test_programs_are_started_by_the_workers_and_an_error_is_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return extra_info['rollout_reward_scores']['reward'] % 3\n"
    )
    program = [
        "actor_rollout_ref.rollout.agent.default_agent_loop=program_agent",
        f"actor_rollout_ref.rollout.agent.program.command=[{sys.executable},{tmp_path}/agent.py]",
        f"custom_reward_function.path={tmp_path}/reward.py",
        "trainer.total_training_steps=1",
        f"{WORKERS}=1",
    ]
    ((step,), _) = run([*arguments, *program], tmp_path / "programs")
    assert step["program_error_counts/max"] == 0 and step["num_turns/mean"] == 2
    (tmp_path / "fail").touch()
    own = [*arguments, f"{WORKERS}=1", f"trainer.default_local_dir={tmp_path}/fails"]
    capsys.readouterr()
    assert main(own) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "color" in line]
    assert line.startswith("error: ValueError: the row has no color, raised by your code at ")
    assert re.search(r"loop\.py:\d+ in run", line)


def test_the_number_of_workers_is_checked() -> None:
    with pytest.raises(ValueError, match=rf"{WORKERS}=-1: must be"):
        load_config(PPOConfig, [f"{WORKERS}=-1"])
