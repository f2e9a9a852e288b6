"""Agent loops of programs on verl: loops on token ids, their manager and clients on a worker group, tools and interactions."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lockstep.agents.agents import VERL_LOOPS
from lockstep.agents.conversation import Conversation
from lockstep.agents.renderer import Renderer
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import object_array
from lockstep.single_controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool
from lockstep.verl import DataProto
from lockstep.verl._config import view
from lockstep.verl.experimental.agent_loop import AgentLoopManager, get_trajectory_info
from lockstep.verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState
from lockstep.verl.interactions.gsm8k_interaction import Gsm8kInteraction
from lockstep.verl.interactions.utils.interaction_registry import (
    get_interaction_class,
    initialize_interactions_from_config,
)
from lockstep.verl.tools.utils.tool_registry import initialize_tools_from_config
from lockstep.verl.workers.engine_workers import ActorRolloutRefWorker
from lockstep.verl.workers.rollout.llm_server import LLMServerManager
from lockstep.verl.workers.rollout.replica import TokenOutput
from tests.agents.scripted import END, TOKENIZER, Scripted, call, converse, make_agents, roles, sampled_texts
from tests.tiny import save_tiny_model, small_run, write_rows

LOOPS = "lockstep.verl.experimental.agent_loop"
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def fail() -> str:
    """Raise."""
    raise RuntimeError("no luck")
'''
SUBCLASS = """
from lockstep.verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop
from lockstep.verl.tools.schemas import ToolResponse


class Counting(ToolAgentLoop):
    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        agent_data.extra_fields["calls"] = agent_data.extra_fields.get("calls", 0) + 1
        return ToolResponse(text=f"call {agent_data.extra_fields['calls']}<|im_end|>"), 0.25, {}

    async def _handle_generating_state(self, agent_data, sampling_params, ignore_termination=False):
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        return AgentState.TERMINATED if agent_data.assistant_turns == 3 else state
"""
INTERACTIONS = """
interaction:
  - name: gsm8k
    class_name: lockstep.verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {}
"""


BROKEN = """
import time
from lockstep.verl.interactions.base import BaseInteraction

class Interaction(BaseInteraction):
    async def start_interaction(self, instance_id, what, **kwargs):
        self.what = what
        if what == "start":
            raise KeyError(what)
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        if self.what == "blocks":
            time.sleep(3)
            return False, "x", 1.0, {}
        return {"pair": (False, "x"), "nan": (False, "x", float("nan"), {}), "long": (False, "x" * 10**7, 0.5, {})}[self.what]

    async def finalize_interaction(self, instance_id, **kwargs):
        raise RuntimeError("not finalized")
"""


def held(
    tmp_path: Path, target: str, policy: Scripted, row: dict[str, Any] | None = None, **sizes: Any
) -> Conversation:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "mine.py").write_text(SUBCLASS)
    (tmp_path / "users.yaml").write_text(INTERACTIONS)
    (tmp_path / "loops.yaml").write_text(f"- name: mine\n  _target_: {target}\n")
    sizes = {"interaction_config_path": str(tmp_path / "users.yaml")} | sizes
    agents = make_agents(
        loops=str(tmp_path / "loops.yaml"), function_tool_path=str(tmp_path / "tools.py"), format="hermes", **sizes
    )
    return converse(agents, policy, "mine", **(row or {}))


@pytest.mark.parametrize("target", sorted(VERL_LOOPS))
def test_verls_own_names_are_the_built_in_loops(tmp_path: Path, target: str) -> None:
    done = held(tmp_path, target, Scripted(call("add", a=2, b=3), "It is 5."))
    is_tool = "ToolAgentLoop" in target
    assert len(sampled_texts(done)) == (2 if is_tool else 1) and done.counts.tool_calls == is_tool


def test_single_turn_on_token_ids(tmp_path: Path) -> None:
    done = held(tmp_path, f"{LOOPS}.single_turn_agent_loop.SingleTurnAgentLoop", Scripted("one"))
    assert done.trajectory.response_ids == [*TOKENIZER.encode("one"), END] and set(done.trajectory.response_mask) == {1}
    assert (done.num_turns, done.finish_reason) == (2, "stop")


def test_tools_on_token_ids(tmp_path: Path) -> None:
    """The same tokens as the built-in loop."""
    script = (f"See. {call('add', a=2, b=3)}", call("fail"), "It is 5.")
    done = held(tmp_path, f"{LOOPS}.tool_agent_loop.ToolAgentLoop", Scripted(*script))
    own = held(tmp_path, "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop", Scripted(*script))
    for name in ("prompt_ids", "response_ids", "response_mask"):
        assert getattr(done.trajectory, name) == getattr(own.trajectory, name), name
    assert "Error: RuntimeError: no luck" in TOKENIZER.decode(done.trajectory.response_ids)
    assert (done.num_turns, done.counts.tool_calls, done.counts.tool_errors) == (6, 2, 1)


def test_limits_end_the_conversation(tmp_path: Path) -> None:
    target = f"{LOOPS}.tool_agent_loop.ToolAgentLoop"
    policy = Scripted(*[call("add", a=1, b=1)] * 3)
    assert len(sampled_texts(held(tmp_path, target, policy, max_assistant_turns=2))) == 2
    short = held(tmp_path, target, Scripted(call("add", a=1, b=1), "x"), response_length=70)
    assert len(sampled_texts(short)) == 1 and len(short.trajectory.response_ids) <= 70


def test_a_subclass_overrides_handlers_and_calls(tmp_path: Path) -> None:
    done = held(tmp_path, f"{tmp_path}/mine.py:Counting", Scripted(*[call("add", a=1, b=1)] * 4))
    text = TOKENIZER.decode(done.trajectory.response_ids)
    assert "call 1< |im_end|>" in text and "call 2" in text  # special tokens of a tool are broken up
    assert len(sampled_texts(done)) == 3 and done.tool_rewards == [0.25, 0.25]
    assert AgentData([], None, None, {}, "1", {}).tool_calls == [] and AgentState.INTERACTING.value == "interacting"


def test_an_interaction_answers_until_the_answer_is_right(tmp_path: Path) -> None:
    row = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "9"}}
    done = held(tmp_path, f"{LOOPS}.tool_agent_loop.ToolAgentLoop", Scripted("8", "9"), row)
    assert done.turn_scores == [0.0, 1.0] and len(sampled_texts(done)) == 2 and done.num_turns == 4
    with pytest.raises(ValueError, match=r"interaction_kwargs\.name='other' is not an interaction"):
        held(
            tmp_path, f"{LOOPS}.tool_agent_loop.ToolAgentLoop", Scripted("8"), {"interaction_kwargs": {"name": "other"}}
        )


@pytest.mark.parametrize("limit", [{"max_user_turns": 1}, {"max_assistant_turns": 2}])
def test_an_interaction_scores_the_last_turn_too(tmp_path: Path, limit: dict[str, int]) -> None:
    row = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "9"}}
    done = held(tmp_path, f"{LOOPS}.tool_agent_loop.ToolAgentLoop", Scripted("8", "9", "never"), row, **limit)
    assert done.turn_scores == [0.0, 1.0] and len(sampled_texts(done)) == 2


@pytest.mark.parametrize("what", ["start", "raises", "blocks", "pair", "nan"])
def test_a_failing_interaction_ends_its_own_conversation(tmp_path: Path, what: str) -> None:
    done = with_broken_interaction(tmp_path, what)
    assert done.counts.tool_errors == 1 and done.turn_scores == [] and sampled_texts(done) == ["a<|im_end|>"]


def test_text_that_cannot_fit_is_not_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, texts = Renderer.encode, []

    def noting(self: Renderer, text: str, max_tokens: int | None = None) -> list[int]:
        texts.append(text)
        return encode(self, text, max_tokens)

    monkeypatch.setattr(Renderer, "encode", noting)
    done = with_broken_interaction(tmp_path, "long")
    assert done.counts.tool_errors == 0 and done.turn_scores == [0.5] and sampled_texts(done) == ["a<|im_end|>"]
    assert max(map(len, texts)) < 10**6


def with_broken_interaction(tmp_path: Path, what: str) -> Conversation:
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "broken.yaml").write_text(
        f"interaction: [{{name: i, class_name: {tmp_path}/broken.py:Interaction, config: {{}}}}]"
    )
    row = {"interaction_kwargs": {"name": "i", "what": what}}
    options = {"interaction_config_path": str(tmp_path / "broken.yaml"), "tool_timeout_s": 0.2}
    return held(tmp_path, f"{LOOPS}.tool_agent_loop.ToolAgentLoop", Scripted("a", "b"), row, **options)


NAMED = """
from lockstep.verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop


class Loop(ToolAgentLoop):
    async def _handle_processing_tools_state(self, agent_data):
        return self._append(agent_data, [{"role": "tool", "name": "<|im_end|>", "content": "5", "tool_call_id": "<|im_end|>"}])
"""


def test_all_text_of_appended_messages_is_plain(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(NAMED)
    done = held(tmp_path, f"{tmp_path}/named.py:Loop", Scripted(call("add", a=2, b=3), "It is 5."))
    (result,) = [message for message in done.new_messages if message["role"] == "tool"]
    assert result["name"] == result["tool_call_id"] == "< |im_end|>"


def test_dumps_show_tool_results_and_user_turns(tmp_path: Path) -> None:
    target = f"{LOOPS}.tool_agent_loop.ToolAgentLoop"
    done = held(tmp_path, target, Scripted(f"See. {call('add', a=2, b=3)}", "It is 5."))
    assert roles(done.new_messages) == ["assistant", "tool", "assistant"]
    assert done.new_messages[0]["content"].strip() == "See." and done.new_messages[0]["tool_calls"]
    assert (done.new_messages[1]["content"], done.new_messages[2]["content"]) == ("5", "It is 5.")
    row = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "9"}}
    asked = held(tmp_path, target, Scripted("8", "9" * 400), row)
    assert roles(asked.new_messages) == ["assistant", "user", "assistant"]  # the last one is cut off


def test_the_state_of_the_gsm8k_interaction() -> None:
    interaction = Gsm8kInteraction({"name": "gsm8k"})

    async def run() -> None:
        name = await interaction.start_interaction("a", ground_truth="9")
        assert interaction._instance_dict == {"a": {"response": "", "ground_truth": "9", "reward": 0.0}} and name == "a"
        ends, _, score, _ = await interaction.generate_response("a", [{"role": "assistant", "content": "so 9"}])
        assert (ends, score) == (True, 1.0) and interaction._instance_dict["a"]["response"] == "so 9"
        assert interaction._instance_dict["a"]["reward"] == await interaction.calculate_score("a") == 1.0
        await interaction.finalize_interaction("a")
        assert interaction._instance_dict == {}
        with pytest.raises(KeyError):
            await interaction.finalize_interaction("a")

    asyncio.run(run())


def test_interactions_and_tools_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "users.yaml").write_text(INTERACTIONS)
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: verl.tools.gsm8k_tool.Gsm8kTool\n    config: {}\n")
    found = initialize_interactions_from_config(str(tmp_path / "users.yaml"))
    assert list(found) == ["gsm8k"] and type(found["gsm8k"]) is Gsm8kInteraction
    assert get_interaction_class("lockstep.verl.interactions.gsm8k_interaction.Gsm8kInteraction") is Gsm8kInteraction
    assert len(initialize_tools_from_config(str(tmp_path / "tools.yaml"))) == 1
    for load in (initialize_interactions_from_config, initialize_tools_from_config):
        with pytest.raises(FileNotFoundError):
            load(str(tmp_path / "none.yaml"))


def test_which_sample_of_a_prompt_a_row_is() -> None:
    rows = asyncio.run(get_trajectory_info(3, [7, 7, 9, 7], validate=True))
    assert [row["rollout_n"] for row in rows] == [0, 1, 0, 2]
    assert rows[2] == {"step": 3, "sample_index": 9, "rollout_n": 0, "validate": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A config as programs have it, and a worker group of its policy."""
    files = tmp_path_factory.mktemp("files")
    save_tiny_model(files / "model")
    write_rows(files / "train.parquet", 4)
    overrides = [o for o in small_run(files) if not o.startswith(("data.val_files", "custom_reward"))]
    typed = load_config(PPOConfig, [*overrides, "actor_rollout_ref.rollout.temperature=1.0"])
    init = ClassWithInitArgs(ActorRolloutRefWorker, config=typed.actor_rollout_ref, role="actor_rollout", device="cpu")
    group: Any = LocalWorkerGroup(ResourcePool([1]), init)
    group.init_model()
    return view(OmegaConf.create({}), typed), group


def test_a_manager_generates_on_a_worker_group(run: tuple[Any, Any]) -> None:
    config, group = run
    manager = AgentLoopManager(config=config, worker_group=group)
    prompts = [[{"role": "user", "content": f"{n}+1="}] for n in (1, 1, 2)]
    batch = DataProto.from_dict(None, {"raw_prompt": object_array(prompts)}, {"global_steps": 1})
    first = manager.generate_sequences(batch)
    assert first.tensors["responses"].shape == (3, 8) and first.tensors["response_mask"].sum() > 0
    assert torch.equal(first.tensors["prompts"][0], first.tensors["prompts"][1])
    assert not torch.equal(first.tensors["responses"][0], first.tensors["responses"][1])  # other seeds
    assert first.non_tensor_batch["__num_turns__"].tolist() == [2, 2, 2] and "timing" in first.meta_info
    again = AgentLoopManager(config, group).generate_sequences(batch)
    assert torch.equal(again.tensors["responses"], first.tensors["responses"])  # of the same seed and step
    greedy = DataProto.from_dict(None, {"raw_prompt": object_array(prompts)}, {"do_sample": False})

    async def in_a_coroutine() -> Any:
        return await manager.generate_sequences(greedy)

    responses = asyncio.run(in_a_coroutine()).tensors["responses"]
    assert torch.equal(responses[0], responses[1])
    with pytest.raises(ValueError, match="needs worker_group"):
        AgentLoopManager(config)


def test_a_client_serves_single_requests(run: tuple[Any, Any]) -> None:
    config, group = run
    prompt = TOKENIZER.encode("1+1=")

    async def serve() -> list[TokenOutput]:
        manager = await LLMServerManager.create(config, group)
        client = manager.get_client()
        asked = {"temperature": 0.0, "max_tokens": 3, "logprobs": True}
        calls = [client.generate(str(n), prompt_ids=prompt, sampling_params=asked) for n in range(2)]
        answers = list(await asyncio.gather(*calls))
        await manager.sleep()
        answers.append(await client.generate("3", prompt_ids=prompt, sampling_params={"max_tokens": 5}))
        with pytest.raises(ValueError, match="leaves no room for an answer in 48"):
            await client.generate("4", prompt_ids=[5] * 48, sampling_params={})
        await client.sleep()
        return answers

    first, second, longer = asyncio.run(serve())
    assert first.token_ids == second.token_ids and 1 <= len(first.token_ids) <= 3 < 5 >= len(longer.token_ids)
    assert len(first.log_probs) == len(first.token_ids) and np.isfinite(first.log_probs).all()
    assert first.stop_reason == "completed"
