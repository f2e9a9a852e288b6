"""Loops written for verl: they run with another import only, and what they return is what the policy sampled."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.agents import Agents
from lockstep.agents.conversation import Conversation
from tests.agents.scripted import END, TOKENIZER, Scripted, converse, make_agents

IMPORTS = """
import asyncio
from typing import Any
from uuid import uuid4

from lockstep.agents import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
"""
TWO_TURNS = """
@register("checker")
class CheckerLoop(AgentLoopBase):
    def __init__(self, *args, question="Sure?", **kwargs):
        super().__init__(*args, **kwargs)
        self.response_length = self.config.actor_rollout_ref.rollout.response_length
        self.question = question

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        assert kwargs["extra_info"] == {"index": 3}
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(
                kwargs["raw_prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
            ),
        )
        request_id = uuid4().hex
        first = await self.server_manager.generate(
            request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        asked = self.tokenizer.encode(f"\\n<|im_start|>user\\n{self.question}<|im_end|>\\n<|im_start|>assistant\\n")
        second = await self.server_manager.generate(
            request_id=request_id,
            prompt_ids=prompt_ids + first.token_ids + asked,
            sampling_params=sampling_params | {"max_tokens": 4},
        )
        response_ids = first.token_ids + asked + second.token_ids
        response_mask = [1] * len(first.token_ids) + [0] * len(asked) + [1] * len(second.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[: self.response_length],
            response_mask=response_mask[: self.response_length],
            response_logprobs=None,
            reward_score=0.5,
            num_turns=4,
            metrics=AgentLoopMetrics(),
        )
"""
ONE_TURN = """
class Loop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        out = await self.server_manager.generate("1", prompt_ids=ids, sampling_params={params})
        response_ids, mask = list(out.token_ids), [1] * len(out.token_ids)
        {change}
        return AgentLoopOutput(ids, response_ids, mask, metrics={{}}, {more})
"""


def held(tmp_path: Path, source: str, policy: Scripted, options: str = "", **sizes: Any) -> Conversation:
    (tmp_path / "mine.py").write_text(IMPORTS + source)
    name = "CheckerLoop" if "CheckerLoop" in source else "Loop"
    (tmp_path / "loops.yaml").write_text(f"- name: mine\n  _target_: {tmp_path}/mine.py:{name}\n{options}")
    agents = make_agents(loops=str(tmp_path / "loops.yaml"), **sizes)
    return converse(agents, policy, "mine", extra_info={"index": 3})


AT_ONCE = """
class Loop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        calls = [self.server_manager.generate(str(n), prompt_ids=ids, sampling_params=sampling_params) for n in range(3)]
        out, *_ = await asyncio.gather(*calls)
        return AgentLoopOutput(ids, out.token_ids, [1] * len(out.token_ids))
"""


def test_requests_at_the_same_time_have_different_seeds(tmp_path: Path) -> None:
    policy = Scripted("one", "two", "three")
    held(tmp_path, AT_ONCE, policy)
    assert len({request.seed for request in policy.requests}) == 3


def test_the_template_has_the_arguments_of_the_data(tmp_path: Path) -> None:
    policy = Scripted("one")
    (tmp_path / "mine.py").write_text(IMPORTS + ONE_TURN.format(params="sampling_params", change="", more=""))
    agents = make_agents(loop=f"{tmp_path}/mine.py:Loop")
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{% if brief is defined %}Be brief. {% endif %}" + tokenizer.chat_template
    agents = Agents(agents.config, tokenizer, [END], {"brief": True})
    converse(agents, policy, f"{tmp_path}/mine.py:Loop")
    assert TOKENIZER.decode(policy.requests[0].prompt_ids).startswith("Be brief. ")


@pytest.mark.usefixtures("no_registrations")
def test_a_loop_of_verl_runs(tmp_path: Path) -> None:
    policy = Scripted("one", "a long answer")
    done = held(tmp_path, TWO_TURNS, policy, options="  question: Really?\n")
    trajectory = done.trajectory
    asked = TOKENIZER.encode("\n<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\n")
    first, second = [*TOKENIZER.encode("one"), END], TOKENIZER.encode("a lo")
    assert trajectory.prompt_ids == policy.requests[0].prompt_ids
    assert trajectory.response_ids == first + asked + second
    assert trajectory.response_mask == [1] * 4 + [0] * len(asked) + [1] * 4
    assert trajectory.log_probs == [-0.5] * 4 + [0.0] * len(asked) + [-0.5] * 4
    assert trajectory.policy_versions == [0] * 4 + [-1] * len(asked) + [1] * 4
    assert (done.num_turns, done.finish_reason, done.reward_scores) == (4, "length", {"reward_score": 0.5})
    assert [message["content"] for message in done.new_messages] == ["one", "a lo"]
    assert policy.requests[0].seed != policy.requests[1].seed


@pytest.mark.usefixtures("no_registrations")
def test_messages_of_the_loop_are_those_of_the_conversation(tmp_path: Path) -> None:
    more = (
        "messages=[*kwargs['raw_prompt'], {'role': 'assistant', 'content': 'one'}, {'role': 'user', 'content': 'more'}]"
    )
    done = held(tmp_path, ONE_TURN.format(params="sampling_params", change="", more=more), Scripted("one"))
    assert [message["content"] for message in done.new_messages] == ["one", "more"]


@pytest.mark.usefixtures("no_registrations")
def test_conversations_do_not_share_an_object(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(IMPORTS + ONE_TURN.format(params="sampling_params", change="", more=""))
    agents: Agents = make_agents(loop=f"{tmp_path}/mine.py:Loop")
    row = {"raw_prompt": [{"role": "user", "content": "Q"}]}
    policy = Scripted("one", "two", "three")

    async def run() -> list[Conversation]:
        from lockstep.protocol.generation import SamplingParams

        async with agents.running():
            parts = (agents.converse(row, [5], policy, SamplingParams(max_tokens=9), seed) for seed in range(3))
            return await asyncio.gather(*parts)

    assert sorted(done.new_messages[0]["content"] for done in asyncio.run(run())) == ["one", "three", "two"]


@pytest.mark.usefixtures("no_registrations")
def test_tokens_may_be_masked_and_cut(tmp_path: Path) -> None:
    change = "mask[0] = 0; response_ids, mask = response_ids[:3], mask[:3]"
    done = held(tmp_path, ONE_TURN.format(params="sampling_params", change=change, more=""), Scripted("word"))
    assert done.trajectory.response_mask == [0, 1, 1] and done.trajectory.log_probs == [0.0, -0.5, -0.5]
    assert done.trajectory.response_ids == TOKENIZER.encode("wor")


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize(
    "change, message",
    [
        ("response_ids[1] += 1", r"row 3: response_mask is 1 for token \d+ at place 1 .* did not sample there"),
        ("response_ids.insert(0, 9); mask.insert(0, 0)", r"row 3: response_mask is 1 for token \d+ at place 1 "),
        ("response_ids.append(9); mask.append(1)", r"response_mask is 1 for token 9 at place 5 "),
        ("ids = ids[1:]", r"response_mask is 1 for token \d+ at place 0 "),
        ("mask.append(0)", "response_mask has 6 entries for 5 response_ids"),
        (
            "response_ids += [9] * 400; mask += [0] * 400",
            r"response_ids has 405 tokens, but .*rollout.response_length=400",
        ),
        ("ids = ids * 9", r"prompt_ids has \d+ tokens, but actor_rollout_ref.rollout.prompt_length=100"),
    ],
)
def test_other_tokens_stop_the_run(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"agent loop Loop, {'row 3: ' if 'row 3' not in message else ''}{message}"):
        held(tmp_path, ONE_TURN.format(params="sampling_params", change=change, more=""), Scripted("word"))


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize(
    "params, more, message",
    [
        ("sampling_params | {'temperature': 0.3}", "", "temperature=0.3: .* set actor_rollout_ref.rollout.temperature"),
        (
            "sampling_params | {'stop': ['x']}",
            "",
            r"stop=\['x'\]: the loss needs the rollout's own distribution; remove",
        ),
        ("sampling_params, image_data=[1]", "", "image_data and video_data are not supported"),
        ("sampling_params", "extra_fields={'a': 1}", "extra_fields are not supported"),
    ],
)
def test_what_cannot_be_trained_on_stops_the_run(tmp_path: Path, params: str, more: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        held(tmp_path, ONE_TURN.format(params=params, change="", more=more), Scripted("word"))


@pytest.mark.usefixtures("no_registrations")
def test_a_prompt_without_room_stops_the_run(tmp_path: Path) -> None:
    source = ONE_TURN.format(params="sampling_params", change="", more="").replace(
        "prompt_ids=ids", "prompt_ids=ids * 99"
    )
    with pytest.raises(ValueError, match=r"leaves no room for an answer in 500"):
        held(tmp_path, source, Scripted("word"))
