"""Lengths of earlier answers, and the order in which the embedded engine starts sequences by them."""

from pathlib import Path

import pytest
import torch

from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded.answer_lengths import NUM_LATEST, AnswerLengths
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.history import prompt_key
from lockstep.utils.state_file import load_state, save_state
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
    again.load_states([load_state(tmp_path / "rank_0")])
    for key in [*map(prompt_key, requests), b"?"]:
        assert again.answer_lengths.expected(key) == engine.answer_lengths.expected(key) > 0
        for lengths in (engine.answer_lengths, again.answer_lengths):
            lengths.add(key, 3)
    assert again.answer_lengths.expected(b"?") == engine.answer_lengths.expected(b"?")
    assert len(again.answer_lengths) == len(engine.answer_lengths) == 5


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
