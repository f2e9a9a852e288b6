"""Conversations keep the experts of their tokens: of each token those with which it was computed first."""

import asyncio
from pathlib import Path

import numpy as np

from lockstep.agents.conversation import Conversation
from lockstep.agents.renderer import Renderer
from lockstep.agents.trajectory import Trajectory
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from lockstep.workers.rollout_batch import route_column
from tests.agents.scripted import END, TOKENIZER, Scripted
from tests.agents.test_agent_loop_base import ONE_TURN, TWO_TURNS, held


class Routed(Scripted):
    """With the number of the request as the only expert of every token that it computes."""

    async def __call__(self, request: GenerationRequest) -> Completion:
        completion = await super().__call__(request)
        length = len(request.prompt_ids) + len(completion.token_ids) - 1
        routes = np.full((length, 1, 1), len(self.requests) - 1, np.int16)
        return Completion(
            completion.token_ids, completion.log_probs, completion.stop_reason, completion.policy_versions, 0, routes
        )


def check(trajectory: Trajectory, first: GenerationRequest, second: GenerationRequest, num_first: int) -> None:
    """The first request computed all but its last token; the second one the rest, without its last token."""
    assert trajectory.routes is not None
    computed = len(first.prompt_ids) + num_first - 1
    assert trajectory.routes[:computed].ravel().tolist() == [0] * computed
    assert trajectory.routes[computed:].ravel().tolist() == [1] * (len(trajectory.ids) - 1 - computed)


def test_turns_of_a_conversation() -> None:
    policy = Routed("one", "two")

    async def talk() -> Conversation:
        conversation = Conversation(
            {"raw_prompt": [{"role": "user", "content": "Q"}]},
            [1, 2, 3],
            complete=policy,
            renderer=Renderer(TOKENIZER, [END]),
            sampling=SamplingParams(max_tokens=100),
            seed=0,
            response_length=100,
        )
        await conversation.generate()
        conversation.add([{"role": "user", "content": "and?"}])
        await conversation.generate()
        return conversation

    trajectory = asyncio.run(talk()).trajectory
    check(trajectory, *policy.requests, num_first=4)
    column = route_column([trajectory.routes], [len(trajectory.ids)], 120)
    assert column.values.ravel().tolist()[-2:] == [1, -1]


def test_a_loop_of_verl(tmp_path: Path) -> None:
    policy = Routed("yes", "no")
    trajectory = held(tmp_path, TWO_TURNS, policy).trajectory
    num_first = next(place for place, mask in enumerate(trajectory.response_mask) if not mask)
    check(trajectory, *policy.requests, num_first=num_first)


def test_a_loop_that_cuts_an_answer_has_no_experts_for_it(tmp_path: Path) -> None:
    source = ONE_TURN.format(
        params="sampling_params", change="response_ids, mask = response_ids[:2], mask[:2]", more=""
    )
    assert held(tmp_path, source, Routed("four")).trajectory.routes is None


def test_a_column_of_rows_with_and_without_experts() -> None:
    known = np.arange(6, dtype=np.int8).reshape(3, 2, 1)
    column = route_column([None, known, known[:0]], [2, 4, 1], 8)
    assert column.shape == (3, 8, 2, 1)
    assert column.values[:, :, 0].tolist() == [[-1, -1]] * 2 + [[0, 1], [2, 3], [4, 5], [-1, -1]] + [[-1, -1]]
    assert route_column([None], [3], 8).values.shape == (3, 0, 0)
    longer = route_column([known], [2], 8)  # cut like its row
    assert longer.values[:, :, 0].tolist() == [[0, 1], [2, 3]]
