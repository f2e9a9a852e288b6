"""Which turn a reward of a tool or an interaction belongs to."""

import asyncio
from typing import Any

from hypothesis import given, strategies as st

from lockstep.agents.conversation import Conversation
from lockstep.agents.renderer import Renderer
from lockstep.agents.trajectory import Trajectory
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from tests.agents.scripted import END, TOKENIZER, Scripted
from tests.agents.test_renderer import CHATML_PROMPT, DROPS_THINKING, tokenizer_of

RENDERER = Renderer(TOKENIZER, [END])
AGAIN = {"role": "user", "content": "again"}


def conversation(generate: Any, renderer: Renderer = RENDERER, **settings: Any) -> Conversation:
    row = {"raw_prompt": [{"role": "user", "content": "Q"}]}
    prompt_ids, sampling = renderer.ids(row["raw_prompt"]), SamplingParams(max_tokens=1000)
    options = {"complete": generate, "renderer": renderer, "sampling": sampling, "seed": 0, "response_length": 1000}
    return Conversation(row, prompt_ids, **options, **settings)


def num_runs(mask: list[int]) -> int:
    return sum(now and not before for before, now in zip([0, *mask], mask))


@given(st.lists(st.sampled_from(["generate", "generate nothing", "add", "tool", "score"]), max_size=30))
def test_every_reward_belongs_to_one_turn(actions: list[str]) -> None:
    """Also if a loop generates twice in a row, or gets no tokens."""
    texts: list[list[int]] = []

    async def generate(request: GenerationRequest) -> Completion:
        ids = texts.pop()
        return Completion(ids, [-0.5] * len(ids), "stop" if ids else "abort", [0] * len(ids))

    async def run() -> Conversation:
        held, value = conversation(generate), 1.0
        for action in actions:
            if action.startswith("generate"):
                texts.append([] if "nothing" in action else [65, END])
                await held.generate()
            elif action == "add" and held.trajectory.response_ids and held.messages[-1]["role"] == "assistant":
                held.add([AGAIN])
            elif action in ("tool", "score") and held.num_assistant_turns and held.trajectory.response_ids:
                (held.tool_rewards if action == "tool" else held.turn_scores).append(value)
                value *= 2
        return held

    held = asyncio.run(run())
    rewards = held.turn_rewards
    assert len(rewards) == num_runs(held.trajectory.response_mask)
    assert sum(rewards) == sum(held.tool_rewards) + sum(held.turn_scores)


def test_rewards_follow_their_turn() -> None:
    async def run() -> Conversation:
        held = conversation(Scripted("a", "b", "c"))
        await held.generate()
        held.tool_rewards += [1.0, 2.0]  # two calls of one turn
        held.add([AGAIN])
        await held.generate()
        held.add([AGAIN])
        await held.generate()
        held.turn_scores.append(4.0)
        held.tool_rewards.append(8.0)
        return held

    assert asyncio.run(run()).turn_rewards == [3.0, 0.0, 12.0]


def test_rewards_before_the_last_trajectory_are_in_its_first_turn() -> None:
    """A template that drops reasoning starts a new trajectory."""
    renderer = Renderer(tokenizer_of(DROPS_THINKING + CHATML_PROMPT), [2])

    async def run() -> Conversation:
        policy = Scripted("<think>x</think>a", "<think>y</think>b", tokenizer=renderer.tokenizer)
        held = conversation(policy, renderer, follows_template=True)
        await held.generate()
        held.turn_scores.append(1.0)
        held.add([AGAIN])
        await held.generate()
        held.turn_scores.append(2.0)
        return held

    held = asyncio.run(run())
    assert len(held.trajectories) == 2 and held.turn_rewards == [3.0]


def test_rewards_of_a_conversation_that_was_held_elsewhere_are_in_its_last_turn() -> None:
    held = conversation(Scripted())
    held.trajectories = [Trajectory([1], [5, 6, 7], [1, 0, 1], [-1.0, 0.0, -1.0], [0, -1, 0])]
    held.tool_rewards += [1.0, 2.0]
    assert held.turn_rewards == [0.0, 3.0]
