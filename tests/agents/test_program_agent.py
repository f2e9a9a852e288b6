"""Outside programs as agents: what they are given, what becomes of their conversations, and what happens if they fail."""

import asyncio
import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.agents import Agents
from lockstep.agents.loops.program_agent import rewards_of
from lockstep.protocol.generation import SamplingParams
from tests.agents.scripted import END, TOKENIZER, Scripted, converse, make_agents, roles, sampled_texts

CLIENT = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)

def ask(messages, **more):
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]
"""
TWO_TURNS = """
messages = row["prompt"] + [ask(row["prompt"], temperature=0.3)]
messages += [{"role": "user", "content": row["extra_info"]["then"][0]}]
messages += [ask(messages)]
print("done")
print(json.dumps({"reward": 0.5, "steps": 2, "note": "x"}))
"""


def agents_for(tmp_path: Path, program: str, response_length: int = 400, **settings: Any) -> Agents:
    (tmp_path / "agent.py").write_text(CLIENT + program)
    agents = make_agents(response_length)
    agent = replace(
        agents.config.agent,
        program=replace(agents.config.agent.program, command=[sys.executable, str(tmp_path / "agent.py")], **settings),
    )
    return Agents(replace(agents.config, agent=agent), TOKENIZER, [END])


def test_a_program_holds_the_conversation(tmp_path: Path) -> None:
    policy = Scripted("one", "two")
    done = converse(agents_for(tmp_path, TWO_TURNS), policy, "program_agent", extra_info={"then": ["more"]})
    assert sampled_texts(done) == ["one<|im_end|>", "two<|im_end|>"]
    assert roles(done.new_messages) == ["assistant", "user", "assistant"] and done.new_messages[1]["content"] == "more"
    assert (done.num_turns, done.finish_reason, done.counts.breaks, done.counts.program_errors) == (4, "stop", 0, 0)
    assert done.reward_scores == {"reward": 0.5, "steps": 2.0}
    assert policy.requests[1].prompt_ids == done.trajectory.ids[: len(policy.requests[1].prompt_ids)]
    assert [r.sampling.temperature for r in policy.requests] == [1.0, 1.0] and len(
        {r.seed for r in policy.requests}
    ) == 2
    again = Scripted("one", "two")
    converse(agents_for(tmp_path, TWO_TURNS), again, "program_agent", extra_info={"then": ["more"]})
    assert [request.seed for request in again.requests] == [request.seed for request in policy.requests]


def test_special_tokens_of_the_row_stay_and_those_of_the_program_do_not(tmp_path: Path) -> None:
    program = "ask(row['prompt']); ask([{'role': 'user', 'content': 'a<|im_end|>b'}])"
    prompt = [{"role": "system", "content": "S<|im_end|>"}, {"role": "user", "content": "Q"}]
    agents, policy = agents_for(tmp_path, program), Scripted("one", "two")
    converse(agents, policy, "program_agent", raw_prompt=prompt)
    assert policy.requests[0].prompt_ids == agents.renderer.ids(prompt)
    assert "a< |im_end|>b" in TOKENIZER.decode(policy.requests[1].prompt_ids)


def test_a_greedy_sample_with_the_same_seed_changes_nothing(tmp_path: Path) -> None:
    agents = agents_for(tmp_path, "ask(row['prompt'])")
    row = {"raw_prompt": [{"role": "user", "content": "Q"}], "agent_name": "program_agent"}

    async def seeds(*temperatures: float) -> list[int]:
        policies = [Scripted("one") for _ in temperatures]
        samplings = [SamplingParams(temperature=temperature, max_tokens=400) for temperature in temperatures]
        ids = agents.renderer.ids(row["raw_prompt"])  # type: ignore[arg-type]
        async with agents.running():
            await asyncio.gather(*(agents.converse(row, ids, p, s, seed=7) for p, s in zip(policies, samplings)))
        return [policy.requests[0].seed for policy in policies]

    assert asyncio.run(seeds(0.0, 1.0))[1] == asyncio.run(seeds(1.0))[0]


def test_the_program_of_the_docs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (program,) = re.findall(r"```python\n# agent.py\n(.*?)```", page, flags=re.S)
    agents = agents_for(tmp_path, "")
    (tmp_path / "agent.py").write_text(program)
    done = converse(agents, Scripted("8", "9"), "program_agent", reward_model={"ground_truth": "9"})
    assert sampled_texts(done) == ["8<|im_end|>", "9<|im_end|>"] and done.reward_scores == {"reward": 1.0}
    assert [message["content"] for message in done.new_messages] == ["8", "Check your answer.", "9"]


def test_turns_of_another_distribution_are_not_trained_on(tmp_path: Path) -> None:
    agents = agents_for(tmp_path, TWO_TURNS, force_sampling=False)
    done = converse(agents, Scripted("one", "two"), "program_agent", extra_info={"then": ["more"]})
    assert sampled_texts(done) == ["two<|im_end|>"]


def test_branches_are_trajectories_and_the_longest_is_the_last(tmp_path: Path) -> None:
    program = """
first = row["prompt"] + [ask(row["prompt"])]
ask(first + [{"role": "user", "content": "a"}])
ask(first + [{"role": "user", "content": "longer"}])
"""
    done = converse(agents_for(tmp_path, program), Scripted("1", "2", "3"), "program_agent")
    assert sampled_texts(done) == ["1<|im_end|>", "3<|im_end|>"] and done.counts.breaks == 1
    other, last = done.trajectories
    assert other.ids[: len(other.prompt_ids) + 2] == last.ids[: len(last.prompt_ids) + 2]
    assert sum(other.response_mask) == 2 and other.response_mask[:2] == [0, 0]  # "1" is trained on once
    assert TOKENIZER.decode(other.response_ids[-2:]) == "2<|im_end|>"


def test_prompts_and_responses_fit_the_batch(tmp_path: Path) -> None:
    """The prompt has room for 100 tokens, the response for 60."""
    program = "ask([{'role': 'user', 'content': 'x' * 110}])"
    done = converse(agents_for(tmp_path, program, 60), Scripted("y" * 99), "program_agent")
    trajectory = done.trajectory
    assert (len(trajectory.prompt_ids), len(trajectory.response_ids), done.finish_reason) == (100, 60, "length")
    assert 0 < sum(trajectory.response_mask) < 60 and trajectory.response_mask[-1] == 1
    done = converse(agents_for(tmp_path, "ask(row['prompt'])", 60), Scripted("y" * 99), "program_agent")
    assert sum(done.trajectory.response_mask) == 60
    done = converse(
        agents_for(tmp_path, "ask([{'role': 'user', 'content': 'x' * 200}])", 60), Scripted(), "program_agent"
    )
    assert done.counts.program_errors == 1 and done.trajectory.response_ids == []


@pytest.mark.parametrize(
    "program, settings, message",
    [
        ("raise SystemExit('no luck')", {}, "exit code 1; its output ends with:\nno luck"),
        ("", {}, "it made no request"),
        (
            "ask(row['prompt']); import time; time.sleep(60)",
            {"timeout_s": 1.5},
            "exceeded actor_rollout_ref.*timeout_s=1.5",
        ),
    ],
)
def test_a_program_that_fails_costs_its_own_row(
    program: str, settings: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = converse(agents_for(tmp_path, program, **settings), Scripted("one"), "program_agent")
    assert done.counts.program_errors == 1 and done.reward_scores == {}
    assert sampled_texts(done) == (["one<|im_end|>"] if settings else [])
    assert done.finish_reason == ("stop" if settings else "abort")
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert re.search(message, record.getMessage())


@pytest.mark.parametrize("limit", [{"max_assistant_turns": 2}, {"max_user_turns": 1}])
def test_a_program_that_asks_without_end_is_refused(limit: dict[str, Any], tmp_path: Path) -> None:
    agents = agents_for(tmp_path, "while True: ask(row['prompt'])")
    multi_turn = replace(agents.config.multi_turn, **limit)
    done = converse(
        Agents(replace(agents.config, multi_turn=multi_turn), TOKENIZER, [END]), Scripted("1", "2"), "program_agent"
    )
    assert len(done.trajectories) == 2 and "HTTP Error 400" in (done.failure or "")


@pytest.mark.parametrize("ending", ["", "import time; time.sleep(60)"])
def test_processes_that_a_program_starts_end_with_it(ending: str, tmp_path: Path) -> None:
    program = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open({str(tmp_path / "pids")!r}, "w") as file:
    json.dump([os.getpid(), child.pid], file)
ask(row["prompt"])
{ending}
"""
    converse(agents_for(tmp_path, program, timeout_s=2.0 if ending else 60), Scripted("one"), "program_agent")
    for pid in json.loads((tmp_path / "pids").read_text()):
        deadline = time.monotonic() + 10
        while _is_alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    """Zombies that nobody waits for count as dead."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"command": []}, "needs actor_rollout_ref.rollout.agent.program.command"),
        ({"command": ["no-such-program-7"]}, "there is no program 'no-such-program-7'"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    agents = agents_for(tmp_path, "")
    program = replace(agents.config.agent.program, **settings)
    config = replace(agents.config, agent=replace(agents.config.agent, program=program))
    with pytest.raises(ValueError, match=message):
        Agents(config, TOKENIZER, [END]).check_row({"agent_name": "program_agent"})


def test_several_programs(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(CLIENT + "ask(row['prompt']); print(7)")
    entry = {"name": "other", "_target_": "lockstep.agents.loops.ProgramAgent"}
    entry |= {"command": [sys.executable, str(tmp_path / "other.py")]}  # type: ignore[dict-item]
    (tmp_path / "loops.yaml").write_text(json.dumps([entry]))
    done = converse(make_agents(loops=str(tmp_path / "loops.yaml")), Scripted("one"), "other")
    assert done.reward_scores == {"reward": 7.0}


@pytest.mark.parametrize(
    "output, rewards",
    [
        ("", {}),
        ("a\n0.25\n", {"reward": 0.25}),
        ('{"reward": 1}', {"reward": 1.0}),
        ('{"reward": NaN, "a": 2, "b": "c"}', {"a": 2.0}),
        ("1.0\nbye", {}),
        ("[1]", {}),
        ("[" * 9000, {}),
        ("9" * 400, {}),
        ('{"a": Infinity, "b": -2}', {"b": -2.0}),
    ],
)
def test_rewards_of_the_last_line(output: str, rewards: dict[str, float]) -> None:
    assert rewards_of(output) == rewards
