"""Gymnasium-style environments: the order of calls, rewards, limits, failures, and the real environments of skyrl-gym."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.agents import Agents
from lockstep.agents.conversation import Conversation
from lockstep.agents.environments.environment import Calls, EpisodeError
from lockstep.rewards.default import default_compute_score
from tests.agents.scripted import Scripted, converse, make_agents, roles, sampled_texts

ENVS = '''
import time
import numpy as np

class Guess:
    """A number to be guessed; too high or too low after each guess."""

    closed = []

    def __init__(self, number=5):
        self.number = number

    def reset(self, seed=None, hint=""):
        self.seed = seed
        return f"Guess. {hint}{seed}", {}

    def step(self, action):
        guess = int(action)
        if guess == self.number:
            return "", 1.0, True, False, {}
        return "higher" if guess < self.number else "lower", -0.1, False, False, {}

    def close(self):
        self.closed.append(self.number)


class Old(Guess):
    def reset(self):
        return "Guess."

    def step(self, action):
        return ("again <|im_end|>", 0.5, action == "5", {})


class Broken(Guess):
    """`what` of the constructor is what goes wrong."""

    def __init__(self, what):
        self.what = what
        if what == "init":
            raise RuntimeError("no init")

    def reset(self):
        if self.what == "reset":
            raise SystemExit(3)
        if self.what == "array":
            return np.zeros(3)
        return b"bytes" if self.what == "bytes" else "x" * 5000 if self.what == "long" else "Go."

    def step(self, action):
        if self.what == "hang":
            time.sleep(30)
        return {
            "tuple": ("a", 1),
            "reward": ("a", "much", False, {}),
            "nan": ("a", float("nan"), False, {}),
            "text": (3, 1.0, False, {}),
            "done": ("a", 1.0, np.zeros(3), {}),
        }.get(self.what, ("done", 1.0, True, {}))

    def close(self):
        raise RuntimeError("no close")


class Nothing:
    pass
'''


@pytest.fixture
def envs(tmp_path: Path) -> str:
    (tmp_path / "envs.py").write_text(ENVS)
    return str(tmp_path / "envs.py")


def play(agents: Agents, *texts: str, **row: Any) -> tuple[Conversation, Scripted]:
    policy = Scripted(*texts)
    return converse(agents, policy, "gym_agent", **row), policy


def agents_of(env_class: str, *args: Any, **multi_turn: Any) -> Agents:
    """Agents whose config has this class for `gym_agent`."""
    loops = Path(env_class.partition(":")[0]).with_name("loops.yaml")
    entry = {"name": "gym_agent", "_target_": "lockstep.agents.environments.GymAgent", "env_class": env_class}
    loops.write_text(json.dumps([entry]))
    return make_agents(*args, loops=str(loops), **multi_turn)


def test_an_environment_answers_every_turn(envs: str) -> None:
    row: dict[str, Any] = {"env_kwargs": {"number": 4, "other": None}, "index": 7}
    done, policy = play(agents_of(f"{envs}:Guess"), "2", "6", "4", **row)
    assert sampled_texts(done) == ["2<|im_end|>", "6<|im_end|>", "4<|im_end|>"]
    assert [m["content"] for m in done.messages] == ["Q\n\nGuess. 7", "2", "higher", "6", "lower", "4"]
    # the prompt of the row does not have the first observation, so rewards find it among the messages
    assert roles(done.new_messages) == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert done.turn_scores == [-0.1, -0.1, 1.0] and done.reward_scores == {"reward": pytest.approx(0.8)}
    assert (done.finish_reason, done.num_turns, done.counts.environment_errors) == ("stop", 6, 0)
    for request in policy.requests:  # the policy saw exactly the trajectory, and the prompt with the first observation
        assert request.prompt_ids == done.trajectory.ids[: len(request.prompt_ids)]
    assert "Guess. 7" in done.renderer.tokenizer.decode(done.trajectory.prompt_ids)
    extra = {"rollout_reward_scores": done.reward_scores}
    assert default_compute_score("environment/guess", "", None, extra) == {"score": pytest.approx(0.8)}


def test_settings_of_the_loop_and_of_the_row(envs: str, tmp_path: Path) -> None:
    loops = tmp_path / "loops.yaml"
    loops.write_text(
        f"- name: guess\n  _target_: lockstep.agents.environments.GymAgent\n  env_class: {envs}:Guess\n"
        "  env_kwargs: {number: 3}\n  reset_kwargs: {hint: small }\n"
    )
    agents = make_agents(loops=str(loops))
    done = converse(agents, Scripted("3"), "guess", raw_prompt=[{"role": "system", "content": "S"}])
    assert [m["content"] for m in done.messages] == ["S", "Guess. smallNone", "3"] and done.turn_scores == [1.0]
    row = {"extra_info": {"env_kwargs": {"number": 8}, "reset_kwargs": {"seed": 1}}}
    done = converse(agents, Scripted("8"), "guess", **row)
    assert done.messages[0]["content"] == "Q\n\nGuess. small1" and done.turn_scores == [1.0]


def test_old_gym_and_special_tokens(envs: str) -> None:
    done, _ = play(agents_of(f"{envs}:Old"), "1", "5", env_class=f"{envs}:Old")
    assert done.turn_scores == [0.5, 0.5] and done.messages[2]["content"] == "again < |im_end|>"
    assert done.trajectory.response_mask.count(1) == len("1") + len("5") + 2


def test_limits(envs: str) -> None:
    done, _ = play(agents_of(f"{envs}:Guess", max_assistant_turns=2), "1", "2")
    assert (done.finish_reason, len(done.turn_scores), done.reward_scores) == ("turns", 2, {"reward": -0.2})
    done, _ = play(agents_of(f"{envs}:Guess", response_length=20), "1", "2")
    assert done.finish_reason == "length" and len(done.turn_scores) == 1 and len(done.trajectory.response_ids) <= 20
    done, _ = play(agents_of(f"{envs}:Guess", response_length=4), "1         ")
    assert done.finish_reason == "length" and done.turn_scores == [-0.1]  # a turn that was cut is scored, too


@pytest.mark.parametrize(
    "what, problem",
    [
        ("init", "RuntimeError: no init"),
        ("reset", "SystemExit"),
        ("bytes", "not text"),
        ("long", "first messages exceed data.max_prompt_length"),
        ("hang", "took longer than 0.2 s"),
        ("tuple", "must return a tuple of 4 or 5"),
        ("reward", "'much', not a finite number"),
        ("nan", "not a finite number"),
        ("text", "the environment returned int, not text"),
        ("array", "the environment returned ndarray, not text"),
        ("done", "ValueError: The truth value of an array"),
    ],
)
def test_a_failure_costs_its_own_conversation(
    envs: str, caplog: pytest.LogCaptureFixture, what: str, problem: str
) -> None:
    agents = agents_of(f"{envs}:Broken", tool_timeout_s=0.2 if what == "hang" else 30)
    done, policy = play(agents, "1", env_kwargs={"what": what})
    assert done.counts.environment_errors == 1 and done.reward_scores == {} and done.turn_scores == []
    assert problem in caplog.text
    assert len(policy.requests) == (0 if what in ("init", "reset", "bytes", "long", "array") else 1)
    assert len(done.trajectory.response_ids) <= 400
    with pytest.raises(ValueError, match="the environment gave no reward"):
        default_compute_score("environment", "", None, {"rollout_reward_scores": done.reward_scores})


def test_time_outs_of_a_client_keep_their_message() -> None:
    async def connect() -> None:
        raise TimeoutError("no free place on the server")

    with pytest.raises(EpisodeError, match="no free place on the server"):
        asyncio.run(Calls("echo", 5.0).in_loop(connect()))


def test_a_failing_close_is_no_error(envs: str) -> None:
    done, _ = play(agents_of(f"{envs}:Broken"), "1", env_kwargs={"what": ""})
    assert done.reward_scores == {"reward": 1.0} and done.counts.environment_errors == 0


def test_rows_are_checked_before_training(envs: str) -> None:
    with pytest.raises(ValueError, match="needs the column env_class"):
        make_agents().check_row({"agent_name": "gym_agent"})
    for name, problem in [
        ("Gues", "has no attribute 'Gues'. Did you mean 'Guess'"),
        ("Nothing", "has neither `init` nor"),
    ]:
        with pytest.raises(ValueError, match=f"env_class=.*{problem}"):
            agents_of(f"{envs}:{name}").check_row({"agent_name": "gym_agent"})
    row = {"agent_name": "gym_agent", "extra_info": {"env_class": f"{envs}:Guess"}}
    agents_of(f"{envs}:Guess").check_row(row)


class TestSkyrlGym:
    """The real package."""

    @pytest.fixture(autouse=True)
    def _package(self) -> None:
        pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed (make test-environments)")

    def test_several_turns(self) -> None:
        row = {"env_class": "gsm8k_multi_turn", "reward_model": {"ground_truth": "9"}, "extra_info": {"max_turns": 3}}
        done, _ = play(make_agents(), "hm", "#### 8", "#### 9", **row)
        assert done.turn_scores == pytest.approx([0, 0.2 / 3, 1.0]) and done.finish_reason == "stop"
        assert done.reward_scores == {"reward": pytest.approx(1 + 0.2 / 3), "steps": 3.0}
        assert "exact format" in done.new_messages[1]["content"]
        assert (
            default_compute_score("environment", "", None, {"rollout_reward_scores": done.reward_scores})["steps"] == 3
        )

    def test_one_turn(self) -> None:
        row = {"env_class": "gsm8k", "reward_model": {"ground_truth": "9"}}
        done, _ = play(make_agents(), "#### 9", **row)
        assert done.turn_scores == [1.0] and len(done.new_messages) == 1

    def test_what_the_package_refuses(self, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(ValueError, match=r"env_class='gsm8': no such environment. Did you mean 'gsm8k'"):
            make_agents().check_row({"agent_name": "gym_agent", "env_class": "gsm8"})
        done, _ = play(make_agents(), env_class="gsm8k")  # no ground truth
        assert done.counts.environment_errors == 1 and "ground_truth is required" in caplog.text

    def test_configured_by_the_loop(self, tmp_path: Path) -> None:
        loops = tmp_path / "loops.yaml"
        loops.write_text(
            "- name: search\n  _target_: lockstep.agents.environments.GymAgent\n  env_class: search\n"
            "  env_config: {search_url: 'http://127.0.0.1:9/retrieve', topk: 1, timeout: 1, log_requests: false}\n"
        )
        row = {"reward_model": {"ground_truth": {"target": "Paris"}}, "extra_info": {"max_turns": 2}}
        done = converse(make_agents(loops=str(loops)), Scripted("<answer>Paris</answer>"), "search", **row)
        assert done.turn_scores == [1.0]
