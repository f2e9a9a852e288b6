"""Token-exact trajectories: ids, masks, log-probs and policy versions line up, whatever is said."""

import asyncio

import pytest
from hypothesis import given, settings, strategies as st

from lockstep.agents.conversation import Conversation
from lockstep.agents.renderer import Renderer
from lockstep.agents.trajectory import NOT_SAMPLED, Trajectory
from lockstep.protocol import DataProto
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from lockstep.workers.rollout_batch import trajectory_tensors
from tests.agents.scripted import END, TOKENIZER, make_agents

RENDERER = Renderer(TOKENIZER, [END])
TURNS = st.lists(st.tuples(st.lists(st.integers(3, 258), max_size=6), st.text(max_size=8)), min_size=1, max_size=5)


def test_a_completion_must_be_complete() -> None:
    with pytest.raises(ValueError, match="2 tokens has 1 log-probs and 2 policy versions"):
        Trajectory([1]).add_sampled(Completion([5, 6], [-1.0], "stop", [0, 0]))


@settings(deadline=None, max_examples=25)
@given(turns=TURNS, response_length=st.integers(1, 160))
def test_masks_log_probs_versions_and_ids_line_up(turns: list[tuple[list[int], str]], response_length: int) -> None:
    """Each turn samples arbitrary ids, which need not be what the tokenizer makes of their text, and gets any answer."""
    sampled: list[tuple[int, float, int]] = []
    requests: list[GenerationRequest] = []

    async def generate(request: GenerationRequest) -> Completion:
        number = len(requests)
        requests.append(request)
        ids = [*turns[number][0], END][: request.sampling.max_tokens]
        log_probs, versions = [-float(len(sampled) + i) for i in range(len(ids))], [number + i for i in range(len(ids))]
        sampled.extend(zip(ids, log_probs, versions))
        return Completion(ids, log_probs, "stop" if ids[-1] == END else "length", versions)

    async def talk() -> Conversation:
        conversation = Conversation(
            {"raw_prompt": [{"role": "user", "content": "Q"}]},
            [1, 2, 3],
            complete=generate,
            renderer=RENDERER,
            sampling=SamplingParams(max_tokens=response_length),
            seed=0,
            response_length=response_length,
        )
        for _, answer in turns:
            turn = await conversation.generate()
            is_last = len(requests) == len(turns)
            if is_last or not conversation.add([{"role": "user", "content": answer}]):
                break
            assert turn.ended and conversation.room >= 1
        return conversation

    trajectory = asyncio.run(talk()).trajectory
    length = len(trajectory.response_ids)
    assert length == len(trajectory.response_mask) == len(trajectory.log_probs) == len(trajectory.policy_versions)
    assert length <= response_length
    columns = zip(trajectory.response_ids, trajectory.log_probs, trajectory.policy_versions, trajectory.response_mask)
    rows = list(columns)
    assert [row[:3] for row in rows if row[3]] == sampled  # every sampled token, once, in order, as it was sampled
    assert all(row[1:3] == (0.0, NOT_SAMPLED) for row in rows if not row[3])
    for request in requests:  # each request is a prefix of the result
        assert request.prompt_ids == trajectory.ids[: len(request.prompt_ids)]
        assert len(request.prompt_ids) - 3 + request.sampling.max_tokens <= response_length

    config = make_agents(response_length).config
    tensors = DataProto.from_dict(trajectory_tensors([trajectory], config, pad_token_id=0)).tensors
    assert tensors["response_mask"].shape == tensors["responses"].shape == (1, response_length)
    assert tensors["responses"][0, :length].tolist() == trajectory.response_ids
    assert tensors["response_mask"].sum() == len(sampled)
    assert tensors["attention_mask"].sum() == length + 3
    assert tensors["policy_version"].tolist() == [0]
    mask = tensors["response_mask"].bool()
    assert tensors["rollout_log_probs"][mask].tolist() == [log_prob for _, log_prob, _ in sampled]
    assert not tensors["rollout_log_probs"][~mask].any()
