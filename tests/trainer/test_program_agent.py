"""A training run whose conversations are held by an outside program, which knows only the address of a server."""

import json
import os
import sys
from pathlib import Path

import pytest

from lockstep.trainer.ppo.agent_rollout import AgentRollout
from lockstep.trainer.ppo.group_sampler import GroupSampler
from tests.trainer.test_agents import run

PROGRAM = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)
open(os.path.join(os.path.dirname(__file__), "pids", str(os.getpid())), "w").close()
if row["extra_info"]["index"] == 1:
    sys.exit("no luck with this row")
messages = row["prompt"]
for _ in range(2):
    body = json.dumps({"model": "gpt-4o", "messages": messages, "max_tokens": 4, "temperature": 0.1}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages = messages + [answer, {"role": "user", "content": "again"}]
print(sum(map(ord, answer["content"])) % 7 / 7)
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == 1:
        assert solution_str == "" and extra_info["messages"] == [] and extra_info["rollout_reward_scores"] == {}
        return 0.0
    first, asked, last = extra_info["messages"]
    assert asked == {"role": "user", "content": "again"} and last["role"] == "assistant"
    assert extra_info["num_turns"] == 4 and "again" in solution_str
    return extra_info["rollout_reward_scores"]["reward"]
"""


@pytest.fixture
def arguments(overrides: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "agent.py").write_text(PROGRAM)
    (tmp_path / "own_reward.py").write_text(REWARD)
    (tmp_path / "pids").mkdir()
    return [
        *overrides,
        "data.shuffle=false",
        "data.max_response_length=60",
        "trainer.save_freq=0",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        f"custom_reward_function.path={tmp_path}/own_reward.py",
        "actor_rollout_ref.rollout.agent.default_agent_loop=program_agent",
        f"actor_rollout_ref.rollout.agent.program.command=[{sys.executable},{tmp_path}/agent.py]",
    ]


@pytest.mark.usefixtures("no_registrations")
def test_a_program_as_agent_in_both_modes(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps, rollouts = run([*arguments, "trainer.total_training_steps=2"], tmp_path / "async")
    # The program's rows end with the two turns of the policy, 4 tokens each; those of the failed row are empty.
    assert [step["program_error_counts/mean"] for step in steps] == [0.25, 0]
    assert [step["response/aborted_ratio"] for step in steps] == [0.25, 0]
    assert [step["num_turns/max"] for step in steps] == [4, 4]
    # The rollout's log-probs agree with the trainer's at the sampled tokens (the audit would stop the run otherwise).
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert caplog.text.count("no luck with this row") == 2
    started = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(started) == 16
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    sync = ["trainer.total_training_steps=1", "actor_rollout_ref.rollout.mode=sync"]
    _, same = run([*arguments, *sync], tmp_path / "sync")
    assert json.dumps([r["output"] for r in same]) == json.dumps([r["output"] for r in rollouts])


@pytest.mark.usefixtures("no_registrations")
def test_validation_while_conversations_of_training_are_paused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hold conversations, on two event loops and with two clients: the end of a validation cancels its client's requests."""
    validating, training = [], []
    generate, running = AgentRollout._generate, GroupSampler.running
    monkeypatch.setattr(AgentRollout, "_generate", lambda self, p: validating.append(self.client) or generate(self, p))
    monkeypatch.setattr(GroupSampler, "running", lambda self: training.append(self.client) or running(self))
    more = ["trainer.async_mode=colocated", "trainer.test_freq=1", "trainer.total_training_steps=2"]
    steps, _ = run([*arguments, *more], tmp_path / "run")
    assert [any(name.startswith("val-") for name in step) for step in steps] == [True, True]
    assert sum(step["program_error_counts/mean"] for step in steps) <= 0.25
    assert validating and training and not set(validating) & set(training)
