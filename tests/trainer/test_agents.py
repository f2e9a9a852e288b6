"""Conversations in a training run: which tokens are trained on, what the reward function gets, and what is refused."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from lockstep.agents.agents import DEFAULT_KEY
from lockstep.agents.conversation import ConversationResult, Counts
from lockstep.agents.trajectory import Trajectory
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.data.create_dataset import create_rl_dataset
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.generation import WeightsLostError
from lockstep.protocol.images import IMAGES, ImageInputs
from lockstep.single_controller.futures import WorkerDiedError
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo.agent_rollout import AgentRollout, with_responses
from lockstep.trainer.ppo.run_agents import agents_for
from lockstep.utils.audit import AuditError
from tests.agents.scripted import make_agents
from tests.tiny import save_tiny_model, tiny_tokenizer, write_rows

LOOP = """
from lockstep.agents.loops import AgentLoop

class OneToken(AgentLoop):
    '''Two turns of one token each: every token ends a turn, since the untrained model ends none.'''

    async def run(self, conversation):
        await conversation.generate(stop_token_ids=range(259))
        conversation.turn_scores.append(0.5)
        if conversation.add([{"role": "user", "content": "again"}]):
            await conversation.generate(stop_token_ids=range(259))
"""
SHORT_IN_VALIDATION = """
from lockstep.agents.loops import AgentLoop

class ShortInValidation(AgentLoop):
    async def run(self, conversation):
        await conversation.generate(range(259) if conversation.sampling.greedy else ())
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    turns = extra_info["messages"]
    assert [turn["role"] for turn in turns] == ["assistant", "user", "assistant"], turns
    assert extra_info["turn_scores"] == [0.5] and extra_info["num_turns"] == 4
    return sum(map(ord, turns[0]["content"] + turns[2]["content"])) % 7 / 7
"""
TOOL = """
def double(x: int) -> int:
    '''Double a number.

    Args:
        x: The number.
    '''
    return 2 * x
"""


@pytest.fixture
def agent_overrides(overrides: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "own_reward.py").write_text(REWARD)
    return [
        *overrides,
        "data.max_response_length=60",
        "trainer.total_training_steps=2",
        "trainer.save_freq=0",
        f"custom_reward_function.path={tmp_path}/own_reward.py",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/loop.py:OneToken",
    ]


def run(arguments: list[str], folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics of the steps, and the rollouts of the first one."""
    dumps = [f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts"]
    assert main([*arguments, *dumps]) == 0
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (folder / "rollouts" / "1.jsonl").read_text().splitlines()]
    return [step for step in steps if "actor/pg_loss" in step], rollouts


@pytest.mark.usefixtures("no_registrations")
def test_only_the_turns_of_the_policy_are_trained_on_in_both_modes(agent_overrides: list[str], tmp_path: Path) -> None:
    mode = "actor_rollout_ref.rollout.mode"
    steps, rollouts = run([*agent_overrides, f"{mode}=async"], tmp_path / "async")
    assert [step["num_turns/mean"] for step in steps] == [4, 4]
    assert all(step["tool_call_counts/max"] == step["trajectory_breaks/max"] == 0 for step in steps)
    assert all("again" in rollout["output"] for rollout in rollouts)
    for rollout in rollouts:
        assert [message["role"] for message in rollout["messages"]] == ["assistant", "user", "assistant"]
        assert rollout["messages"][1]["content"] == "again" and rollout["num_turns"] == 4
        assert not [name for name in rollout if name.endswith(("_counts", "_breaks"))], "they are 0 everywhere"
    # The rollout's log-probs agree with the trainer's at the sampled tokens (the audit would stop the run otherwise).
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    _, same = run([*agent_overrides, f"{mode}=sync"], tmp_path / "sync")
    assert [(r["input"], r["output"], r["score"]) for r in same] == [
        (r["input"], r["output"], r["score"]) for r in rollouts
    ]


ODD_TEXT = """
from lockstep.agents.loops import AgentLoop

class OddText(AgentLoop):
    # Meets text that is not valid, as tools and environments may return it.

    async def run(self, conversation):
        await conversation.generate(stop_token_ids=range(259))
        if conversation.add([{"role": "user", "content": "no \\ud800"}]):
            await conversation.generate(stop_token_ids=range(259))
        conversation.fail("environment", "\\ud800")
"""


@pytest.mark.usefixtures("no_registrations")
def test_a_run_with_invalid_text_in_its_conversations_ends_and_resumes(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(ODD_TEXT)
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.async_mode=colocated"]
    settings += ["data.max_response_length=60", "trainer.save_freq=1", "trainer.val_before_train=false"]
    settings += [f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/loop.py:OddText"]
    for num_steps in (1, 2):
        steps, rollouts = run([*overrides, *settings, f"trainer.total_training_steps={num_steps}"], tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2]
    assert all("no \N{REPLACEMENT CHARACTER}" in rollout["output"] for rollout in rollouts)


@pytest.mark.usefixtures("no_registrations")
def test_validation_leaves_the_requests_of_asynchronous_training_alone(overrides: list[str], tmp_path: Path) -> None:
    """A step ends with 8 requests unfinished; the conversations of validation end long before those would."""
    (tmp_path / "loop.py").write_text(SHORT_IN_VALIDATION)
    loop = f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/loop.py:ShortInValidation"
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.async_mode=colocated", loop]
    settings += ["data.max_response_length=60", "actor_rollout_ref.rollout.max_num_seqs=9", "trainer.test_freq=1"]
    steps, _ = run([*overrides, *settings, "trainer.total_training_steps=2", "trainer.save_freq=0"], tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2]
    assert all("val-core/openai/gsm8k/reward/mean@1" in step for step in steps)


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize(
    "agent_name, settings, message",
    [
        ("tool_agnt", [], "agent_name='tool_agnt': no such agent loop"),
        ("{folder}/tool.py:now", [], "rows.parquet, row 0: agent_name='{folder}/tool.py:now': no such agent loop"),
        ("tool_agent", [], "needs tools or an interaction"),
        (None, [f"{DEFAULT_KEY}=json:Nope"], f"{DEFAULT_KEY}=json:Nope: 'json' has no attribute 'Nope'"),
        (None, ["actor_rollout_ref.rollout.multi_turn.enable=true"], "every row is served by single_turn_agent"),
        (
            "tool_agent",
            ["data.return_raw_chat=false", "actor_rollout_ref.rollout.multi_turn.function_tool_path={folder}/tool.py"],
            "data.return_raw_chat=false: agents read the messages",
        ),
    ],
)
def test_rows_that_no_loop_serves_end_the_run_before_training(
    agent_name: str | None,
    settings: list[str],
    message: str,
    overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = pd.read_parquet(write_rows(tmp_path / "rows.parquet", 16))
    rows["agent_name"] = agent_name and agent_name.format(folder=tmp_path)
    rows.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "tool.py").write_text("def now() -> str:\n    'The time.'\n    return 'noon'\n")
    settings = [setting.format(folder=tmp_path) for setting in settings]
    assert main([*overrides, f"data.train_files={tmp_path}/rows.parquet", *settings]) == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err


CLOSED = """
from lockstep.agents.tools import CalculatorTool

class Closed(CalculatorTool):
    def close(self):
        open({path!r}, "a").write("closed ")
"""


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize(
    "settings, code",
    [
        (["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"], 0),
        (["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "data.train_batch_size=64"], 2),  # 16 rows
        (["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agnt"], 2),
        ([], 0),  # no row uses the tool
    ],
)
def test_tools_are_closed_when_the_run_ends(
    settings: list[str], code: int, overrides: list[str], tmp_path: Path
) -> None:
    (tmp_path / "tool.py").write_text(CLOSED.format(path=str(tmp_path / "log")))
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: '{tmp_path}/tool.py:Closed'}}]")
    config = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tools.yaml"
    short = ["trainer.total_training_steps=1", "trainer.save_freq=0", f"trainer.default_local_dir={tmp_path}/run"]
    assert main([*overrides, *short, config, *settings]) == code
    assert (tmp_path / "log").read_text() == "closed "


@pytest.mark.usefixtures("no_registrations")
def test_a_column_that_agents_add_is_refused_before_training(
    agent_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pd.read_parquet(write_rows(tmp_path / "rows.parquet", 16))
    rows["messages"] = "x"
    rows.to_parquet(tmp_path / "rows.parquet")
    assert main([*agent_overrides, f"data.train_files={tmp_path}/rows.parquet"]) == 2
    error = capsys.readouterr().err
    assert "rows.parquet, row 0: the column 'messages' has the name of one that agents add to the rows; rename" in error


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize(
    "loop, warning",
    [
        (
            "single_turn_agent",
            "multi_turn.function_tool_path={path}, actor_rollout_ref.rollout.agent.num_workers=2 have no effect: every row is",
        ),
        ("tool_agent", "chat template does not render tools: prompts do not mention double,"),
    ],
)
def test_tools_that_the_policy_cannot_know_are_reported(
    loop: str, warning: str, overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tools.py"
    path.write_text(TOOL)
    settings = [
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={path}",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}",
        f"actor_rollout_ref.rollout.agent.num_workers={2 if loop == 'single_turn_agent' else 0}",
        "trainer.total_training_steps=1",
        "trainer.save_freq=0",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    assert main([*overrides, *settings]) == 0
    assert warning.format(path=path) in caplog.text


TOLERANT = """
from lockstep.agents.loops import AgentLoop

class Tolerant(AgentLoop):
    '''As graphs and programs: a failure costs its own conversation.'''

    async def run(self, conversation):
        try:
            await conversation.generate()
        except Exception:
            conversation.fail("program", "no policy")
"""


class DeadGroup:
    """A rollout whose worker has died."""

    def mesh(self, name: str) -> Any:
        return SimpleNamespace(dp_size=1, dp_ranks=[0])

    def begin_generation(self) -> None:
        """No-op."""

    def call_rank(self, *arguments: Any) -> Any:
        raise WorkerDiedError("the rollout worker died")


def rows_for(number: int, agent_name: str) -> DataProto:
    columns = {
        "raw_prompt_ids": object_array([[5, 6]] * number),
        "raw_prompt": object_array([[{"role": "user", "content": "Q"}]] * number),
        "agent_name": object_array([agent_name] * number),
        "uid": object_array([str(row) for row in range(number)]),
    }
    rows = DataProto.from_dict(tensors={"sampling_seed": torch.arange(number)}, non_tensors=columns)
    rows.meta_info = {"validate": False, "greedy": False, "global_steps": 1}
    return rows


def test_conversations_that_lost_their_policy_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop.py").write_text(TOLERANT)
    agents = make_agents(loop=f"{tmp_path}/loop.py:Tolerant")
    rollout = AgentRollout(agents, DeadGroup(), pad_token_id=0, batch_size=1)
    rows = rows_for(2, agent_name=f"{tmp_path}/loop.py:Tolerant")
    with pytest.raises(WorkerDiedError, match="the rollout worker died"):
        rollout.generate_sequences(rows)

    async def repaired_meanwhile(*arguments: Any, **keywords: Any) -> None:
        rollout.client.forget_failure()
        raise WorkerDiedError("it died before")

    async def lost(*arguments: Any, **keywords: Any) -> None:  # the outcome of a request, not of the client
        raise WeightsLostError("the servers were restarted")

    rollout = AgentRollout(agents, UnusedGroup(), pad_token_id=0, batch_size=1)
    for generate, error in ((repaired_meanwhile, WorkerDiedError), (lost, WeightsLostError)):
        monkeypatch.setattr(rollout.client, "generate", generate)
        with pytest.raises(error):
            rollout.generate_sequences(rows)


class UnusedGroup(DeadGroup):
    def end_generation(self) -> list[Any]:
        return [[]]


class FailingAgents:
    """Conversations that fail before their first turn, except those with these numbers."""

    def __init__(self, *good: int) -> None:
        self.config = make_agents().config
        self.good, self.number = good, -1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def hold(self, *arguments: Any) -> ConversationResult:
        self.number += 1
        rewards: Any = {"tool_rewards": [], "turn_scores": [], "turn_rewards": [], "reward_scores": {}}
        trajectories, is_good = [Trajectory([5, 6])], self.number in self.good
        if is_good:  # as of a program that asked for another distribution: nothing to train on, but a turn
            trajectories[0].add_context([7])
        return ConversationResult(
            trajectories, [], 1 + is_good, Counts(), finish_reason="stop", failure=f"no {self.number}", **rewards
        )


def test_failures_in_a_row_stop_the_run_and_a_short_batch_does_not() -> None:
    agents: Any = FailingAgents(0)
    rollout = AgentRollout(agents, UnusedGroup(), pad_token_id=0, batch_size=4)
    for number in (2, 1, 1):  # three fail in a row
        assert len(rollout.generate_sequences(rows_for(number, "any"))) == number
    with pytest.raises(AuditError, match=r"4 conversations in a row failed .*; the last one: no 4"):
        rollout.generate_sequences(rows_for(1, "any"))


def test_a_short_first_batch_that_fails_stops_the_run() -> None:
    agents: Any = FailingAgents()
    rollout = AgentRollout(agents, UnusedGroup(), pad_token_id=0, batch_size=4)
    with pytest.raises(AuditError, match="2 conversations in a row failed"):
        rollout.generate_sequences(rows_for(2, "any"))


def test_a_conversation_without_the_images_of_its_row_has_none() -> None:
    """A program may describe them, or leave them out."""
    agents: Any = FailingAgents(0)
    rollout = AgentRollout(agents, UnusedGroup(), pad_token_id=0, batch_size=4)
    rows = rows_for(1, "any")
    rows.non_tensor_batch[IMAGES] = object_array([ImageInputs({}, 9, (1,), (bytes(16),))])
    found = with_responses(rows, rollout.generate_sequences(rows))
    assert found.non_tensor_batch[IMAGES].tolist() == [None]


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ([], True),
        (["custom_reward_function.path=reward.py"], False),
        (["reward_model.ensemble={answer:{source:scorer},turns:{source:turn_rewards}}"], False),
        (["reward_model.ensemble={answer:{source:scorer}}"], True),
        (["custom_reward_function.reward_kwargs.scorer=environment_reward"], False),
    ],
)
def test_rewards_of_turns_that_nothing_reads_are_told_once(
    changes: list[str], is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "interaction.yaml").write_text("interaction: [{name: gsm8k, class_name: gsm8k}]\n")
    rows = write_rows(tmp_path / "rows.jsonl", 2)
    entry = '"agent_name": "tool_agent", "interaction_kwargs": {"name": "gsm8k", "ground_truth": "9"}, "ability"'
    rows.write_text(rows.read_text().replace('"ability"', entry))
    key = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
    model = f"actor_rollout_ref.model.path={save_tiny_model(tmp_path / 'model')}"
    config = load_config(PPOConfig, [model, f"{key}={tmp_path}/interaction.yaml", *changes], run_checks=False)
    dataset = create_rl_dataset([str(rows)], tiny_tokenizer(), config.data)
    agents = agents_for(config, tiny_tokenizer(), dataset)
    assert agents is not None
    agents.close()
    assert (caplog.text.count("interaction scores are not part of the reward") == 1) is is_told
