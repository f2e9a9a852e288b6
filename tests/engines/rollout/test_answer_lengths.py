"""Lengths of earlier answers, and the order in which the embedded engine starts sequences by them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.actor_rollout_ref import HistoryDraftsConfig
from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded.answer_lengths import NUM_LATEST, AnswerLengths
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.history import KEY_BYTES, prompt_key
from lockstep.utils.state_file import load_state, save_state
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.engines.rollout.rollout_cases import VOCAB, embedded, tiny_model


def test_mean_of_the_prompt_or_of_all() -> None:
    lengths = AnswerLengths()
    assert lengths.expected(b"a") == 0
    lengths.add(b"a", 10)
    lengths.add(b"a", 20)
    lengths.add(b"b", 60)
    assert lengths.expected(b"a") == 15 and lengths.expected(b"b") == 60 and lengths.expected(b"c") == 30


def test_later_answers_count_more_than_old_ones() -> None:
    lengths = AnswerLengths()
    for _ in range(200):
        lengths.add(b"a", 1000)
    for _ in range(2 * NUM_LATEST):
        lengths.add(b"a", 10)
    assert 10 < lengths.expected(b"a") < 200


def test_prompts_are_bounded() -> None:
    lengths = AnswerLengths(max_prompts=2)
    for key, length in ((b"a", 4), (b"b", 8), (b"a", 4), (b"c", 20)):
        lengths.add(key, length)
    assert len(lengths) == 2 and lengths.expected(b"a") == 4 and lengths.expected(b"b") == lengths.expected(b"?")


def test_state_is_restored_from_a_file(tmp_path: Path) -> None:
    engine = embedded(tiny_model(device=torch.device("cpu")))
    requests = [GenerationRequest([token, 5], SamplingParams(max_tokens=20), token) for token in range(10, 14)]
    engine.generate(requests)
    save_state(tmp_path / "rank_0", engine.saved_state(), owner="the rollout engine")
    again = embedded(tiny_model(device=torch.device("cpu")))
    again.load_states([load_state(tmp_path / "rank_0")], [])
    for key in [*map(prompt_key, requests), b"?"]:
        assert again.answer_lengths.expected(key) == engine.answer_lengths.expected(key) > 0
        for lengths in (engine.answer_lengths, again.answer_lengths):
            lengths.add(key, 3)
    assert again.answer_lengths.expected(b"?") == engine.answer_lengths.expected(b"?")
    assert len(again.answer_lengths) == len(engine.answer_lengths) == 5


def test_a_step_that_is_discarded_is_not_saved() -> None:
    engine = embedded(tiny_model(device=torch.device("cpu")), history_drafts=HistoryDraftsConfig(enable=True))
    first, second = ([GenerationRequest([n, 5], SamplingParams(max_tokens=20), n)] for n in (10, 11))
    engine.generate(first)
    before = engine.saved_state()
    engine.mark_state()
    engine.generate(first + second)
    after = engine.saved_state()
    again = embedded(tiny_model(device=torch.device("cpu")), history_drafts=HistoryDraftsConfig(enable=True))
    for state, num_prompts in ((engine.saved_state(marked=True), 1), (after, 2)):
        again.load_states([state], [])
        assert len(again.answer_lengths) == num_prompts
    marked = engine.saved_state(marked=True)
    assert marked["answer_lengths"]["keys"] == before["answer_lengths"]["keys"] == marked["answers"]["keys"]
    assert marked["answers"]["num_answers"] == before["answers"]["num_answers"] == [1]
    assert np.array_equal(marked["answers"]["tokens"], before["answers"]["tokens"])
    assert np.array_equal(marked["answer_lengths"]["means"], before["answer_lengths"]["means"])


def test_lengths_of_ranks_that_are_gone_are_taken_over() -> None:
    def state(**lengths: int) -> dict[str, Any]:
        found = AnswerLengths()
        for key, length in lengths.items():
            found.add(key.encode() * KEY_BYTES, length)
        return {"answer_lengths": found.state_dict()}

    gone, own, other = state(a=9, b=4), state(b=6, c=2), state(d=7)
    engine = embedded(tiny_model(device=torch.device("cpu")))
    for given, expected in (
        (([own], [other]), {"b": 6, "c": 2}),  # the same number of ranks: as if the run had gone on
        (([gone, own], [other]), {"a": 9, "b": 6, "c": 2}),
        (([], [gone, other]), {"a": 9, "b": 4, "d": 7}),  # a new rank
    ):
        engine.load_states(*given)
        assert len(engine.answer_lengths) == len(expected)
        for key, length in expected.items():
            assert engine.answer_lengths.expected(key.encode() * KEY_BYTES) == length


class Recorded:
    """An engine that tells in which order its sequences start. order: places in the requests."""

    def __init__(self, max_num_seqs: int) -> None:
        self.engine: EmbeddedEngine = embedded(tiny_model(device=torch.device("cpu")), max_num_seqs=max_num_seqs)
        self.order: list[int] = []

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        scheduler = self.engine.scheduler
        start = type(scheduler)._start

        def recorded(sequence: object) -> None:
            start(scheduler, sequence)  # type: ignore[arg-type]
            self.order.append(sequence.request_id)  # type: ignore[attr-defined]

        self.engine.generate(
            [GenerationRequest([3], SamplingParams(max_tokens=1, ignore_eos=True))]
        )  # checks the model
        scheduler._start = recorded  # type: ignore[method-assign]
        self.order = []
        return self.engine.generate(requests)


def test_second_time_the_longest_answers_start_first_and_have_the_same_tokens() -> None:
    engine = Recorded(max_num_seqs=2)
    requests = [
        GenerationRequest([token, 5, 7 + token % 3], SamplingParams(max_tokens=40), seed)
        for token in range(10, 16)
        for seed in range(2)
    ]
    first = engine.generate(requests)
    assert len(engine.engine.answer_lengths) == 6  # neither the check nor a request of a fixed length
    unknown = engine.order
    assert sorted(unknown) == list(range(12)) and unknown[:2] == [0, 1]
    expected = [engine.engine.answer_lengths.expected(prompt_key(request)) for request in requests]
    assert len(set(expected)) > 2
    assert expected[::2] == pytest.approx(
        [sum(len(c.token_ids) for c in first[i : i + 2]) / 2 for i in range(0, 12, 2)]
    )
    shortest_first = sorted(range(12), key=lambda i: expected[i])
    second = engine.generate([requests[i] for i in shortest_first])
    started = [expected[shortest_first[place]] for place in engine.order]
    assert started[:2] == [max(expected)] * 2 and started[-1] == min(expected)
    assert [c.token_ids for c in second] == [first[i].token_ids for i in shortest_first]
    assert [c.log_probs for c in second] == [pytest.approx(first[i].log_probs, abs=1e-5) for i in shortest_first]


def test_key_is_that_of_the_prompt() -> None:
    a = GenerationRequest([1, 2, 3], SamplingParams(max_tokens=4), seed=1)
    b = GenerationRequest([1, 2, 3], SamplingParams(max_tokens=9), seed=2)
    assert prompt_key(a) == prompt_key(b) != prompt_key(GenerationRequest([1, 2, VOCAB - 1], SamplingParams()))


@pytest.mark.parametrize(
    ("rank", "world_size", "tp", "own", "others"),
    [
        (1, 4, 1, [1], [0, 2, 3]),
        (1, 2, 1, [2, 3, 1], [0]),  # two ranks are gone
        (5, 8, 1, [], [0, 1, 2, 3]),  # a new one
        (1, 2, 2, [2, 3, 0], [1]),  # ranks that hold the model together load the same
    ],
)
def test_which_states_a_rank_goes_on_with(
    rank: int, world_size: int, tp: int, own: list[int], others: list[int], tmp_path: Path
) -> None:
    for saved in range(4):
        save_state(tmp_path / f"rank_{saved}", {"rank": saved}, owner="the rollout engine")
    found: list[list[int]] = []
    rollout = SimpleNamespace(
        load_states=lambda *states: found.extend([state["rank"] for state in given] for given in states)
    )
    config = SimpleNamespace(rollout=SimpleNamespace(tensor_model_parallel_size=tp))
    worker: Any = SimpleNamespace(rank=rank, world_size=world_size, config=config, rollout=rollout)
    ActorRolloutRefWorker.load_rollout(worker, str(tmp_path))
    assert found == [own, others]
