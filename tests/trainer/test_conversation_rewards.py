"""A run with agents, a judge and rewards per turn: what reaches the metrics, and that judging passes during generation."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.trainer.main_ppo import main
from tests.judge_server import Answer, JudgeServer, verdict
from tests.rewards.test_judge import response_in

LOOP = """
import asyncio, pathlib, time
WAIT_S = 0
from lockstep.agents.loops import AgentLoop

class TwoTurns(AgentLoop):
    '''Two turns of one token each. The first conversation ends after 4 rows were judged, if that is during generation.'''

    is_first = True

    async def run(self, conversation):
        is_first, self.is_first = self.is_first, False
        for turn in (1, 2):
            await conversation.generate(stop_token_ids=range(259))
            conversation.turn_scores.append(0.25 * turn)
            if turn == 1 and not conversation.add([{"role": "user", "content": "again"}]):
                return
        folder, limit = pathlib.Path(__file__).parent, time.monotonic() + WAIT_S
        while is_first and not (folder / "judged").exists() and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        with (folder / "ends").open("a") as file:
            file.write(f"{time.monotonic()}\\n")
"""
JUDGE_S = 0.1


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[JudgeServer]:
    """Scores by the text, after 100 ms; writes `async/judged` at the fifth request."""

    def answer(body: dict[str, Any], number: int) -> Answer:
        if number == 4 and (tmp_path / "async").is_dir():
            (tmp_path / "async" / "judged").touch()
        return dataclasses.replace(verdict(sum(map(ord, response_in(body))) % 11), delay_s=JUDGE_S)

    with JudgeServer(answer).running() as server:
        yield server


def run(
    overrides: list[str], folder: Path, *settings: str, wait_s: float = 0.0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Metrics and rollouts of the first step. wait_s: how long the first conversation waits for the judge."""
    (folder / "loop.py").write_text(LOOP.replace("WAIT_S = 0", f"WAIT_S = {wait_s}"))
    common = [
        *(
            "data.max_response_length=60",
            "trainer.total_training_steps=1",
            "trainer.save_freq=0",
            "trainer.test_freq=-1",
        ),
        *("custom_reward_function.path=null", "trainer.val_before_train=false", "actor_rollout_ref.rollout.n=2"),
        f"actor_rollout_ref.rollout.agent.default_agent_loop={folder}/loop.py:TwoTurns",
        *(f"trainer.default_local_dir={folder}/run", f"trainer.rollout_data_dir={folder}/rollouts"),
    ]
    assert main([*overrides, *common, *settings]) == 0
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (folder / "rollouts" / "1.jsonl").read_text().splitlines()]
    return next(step for step in steps if "actor/pg_loss" in step), rollouts


@pytest.mark.usefixtures("no_registrations")
def test_the_judge_works_while_conversations_go_on(overrides: list[str], tmp_path: Path, judge: JudgeServer) -> None:
    ensemble = "reward_model.ensemble={style: {source: judge, weight: 0.5}, turns: {source: turn_rewards}}"
    settings = [f"reward_model.judge.base_url={judge.url}", "reward_model.judge.model=grader", ensemble, ""]
    scores = {}
    for mode in ("async", "sync"):
        folder = tmp_path / mode
        folder.mkdir()
        judge.requests.clear()
        settings[-1] = f"actor_rollout_ref.rollout.mode={mode}"
        wait_s = 30.0 if mode == "async" else 0.2
        step, rollouts = run([*overrides, "algorithm.adv_estimator=grpo"], folder, *settings, wait_s=wait_s)
        scores[mode] = [(r["output"], r["score"], r["style"], r["turns"]) for r in rollouts]
        assert step["critic/score/mean"] == pytest.approx(0.5 * step["reward/style/mean"] + step["reward/turns/mean"])
        assert step["reward/turns/mean"] == 0.75 and step["reward/reward_failed/mean"] == 0
        last_end = max(map(float, (folder / "ends").read_text().split()))
        num_early = sum(request["time"] < last_end for request in judge.requests)
        assert num_early >= 5 if mode == "async" else num_early == 0
    assert scores["async"] == scores["sync"]  # nothing depends on the order in which rows are scored


@pytest.mark.usefixtures("no_registrations")
def test_the_judge_is_the_reward_of_a_run(overrides: list[str], tmp_path: Path, judge: JudgeServer) -> None:
    settings = [
        f"reward_model.judge.base_url={judge.url}",
        "reward_model.judge.model=m",
        "reward_model.judge.enable=true",
    ]
    step, rollouts = run([*overrides, "algorithm.adv_estimator=grpo"], tmp_path, *settings)
    assert 0 <= step["critic/score/min"] < step["critic/score/max"] <= 1
    assert {r["judge_reason"] for r in rollouts} == {"because"}


@pytest.mark.usefixtures("no_registrations")
def test_an_estimator_that_reads_tokens_trains_on_rewards_per_turn(overrides: list[str], tmp_path: Path) -> None:
    """gae: with a discount of 0 the return of a token is the reward at it, so the mean return of a turn is its reward."""
    settings = ["reward_model.ensemble={turns: {source: turn_rewards}}", "algorithm.adv_estimator=gae"]
    step, _ = run(overrides, tmp_path, *settings, "algorithm.gamma=0", "algorithm.lam=0")
    assert (step["critic/returns/min"], step["critic/returns/max"]) == (0.25, 0.5)
    assert step["critic/score/mean"] == 0.75


def test_a_judge_that_is_missing_ends_the_run_with_its_key(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["reward_model.judge.enable=true", "reward_model.judge.model=m", "custom_reward_function.path=null"]
    with pytest.raises(SystemExit):
        main([*overrides, *settings])
    assert "reward_model.judge.base_url=null: the judge needs it" in capsys.readouterr().err
    unreachable = ["reward_model.judge.base_url=http://127.0.0.1:9/v1"]
    assert main([*overrides, *settings, *unreachable]) == 2  # before a model is loaded
    assert "reward_model.judge.base_url=http://127.0.0.1:9/v1: cannot connect" in capsys.readouterr().err
