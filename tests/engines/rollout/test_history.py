import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lockstep.engines.rollout.embedded.history import (
    KEY_BYTES,
    MAX_ANSWERS,
    MAX_MATCH,
    MIN_MATCH,
    START,
    AnswerHistory,
    PromptAnswers,
    SortedContexts,
    Trail,
    prompt_key,
)
from lockstep.protocol.generation import GenerationRequest, SamplingParams
from lockstep.utils import state_file

tokens = st.lists(st.integers(0, 3), max_size=40)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def lengths(history: AnswerHistory, of: bytes) -> list[int]:
    """Of the answers that are kept."""
    return [len(answer) for answer in history._prompts[of].answers] if of in history._prompts else []


def naive_draft(answers: list[list[int]], answer: list[int], max_tokens: int) -> list[int]:
    """Compare the end of `answer` with what precedes every token of every answer; of equal ones the latest with most tokens."""
    wanted = [START] * MAX_MATCH + answer
    longest, best = 0, list[int]()
    for seen in answers:
        padded = [START] * MAX_MATCH + seen
        for place in range(MAX_MATCH, len(padded)):
            equal = 0
            while equal < MAX_MATCH and padded[place - 1 - equal] == wanted[len(wanted) - 1 - equal]:
                equal += 1
            draft = padded[place : place + max_tokens]
            if (equal, len(draft)) >= (longest, len(best)):
                longest, best = equal, draft
    return best if longest >= MIN_MATCH else []


@settings(deadline=None, max_examples=150)
@given(st.lists(tokens, max_size=5), tokens, st.integers(1, 8))
def test_drafts_follow_the_longest_match(answers: list[list[int]], answer: list[int], max_tokens: int) -> None:
    history = AnswerHistory(1 << 20)
    for seen in answers:
        history.add(key(0), seen)
    assert history.draft(key(0), answer, max_tokens) == naive_draft(answers, answer, max_tokens)


def longest_matches(answers: list[list[int]], answer: list[int]) -> list[list[int]]:
    """What follows each of the contexts that have the longest match with the end of `answer`."""
    wanted = [START] * MAX_MATCH + answer
    found: dict[int, list[list[int]]] = {}
    for seen in answers:
        padded = [START] * MAX_MATCH + seen
        for place in range(MAX_MATCH, len(padded)):
            equal = 0
            while equal < MAX_MATCH and padded[place - 1 - equal] == wanted[len(wanted) - 1 - equal]:
                equal += 1
            found.setdefault(equal, []).append(padded[place:])
    longest = max(found, default=0)
    return found[longest] if longest >= MIN_MATCH else []


@settings(deadline=None, max_examples=100)
@given(st.lists(tokens, min_size=1, max_size=4), st.data())
def test_a_draft_that_was_right_is_continued(answers: list[list[int]], data: st.DataObject) -> None:
    """Without a search: with a trail the draft follows one of the longest matches, too."""
    history = AnswerHistory(1 << 20)
    for seen in answers:
        history.add(key(0), seen)
    prompt, trail = [7, 7, 7], Trail()
    sequence = list(prompt)
    for _ in range(8):
        draft = history.draft(key(0), sequence, 4, start=len(prompt), trail=trail)
        expected = naive_draft(answers, sequence[len(prompt) :], 4)
        assert len(draft) == len(expected)
        rests = longest_matches(answers, sequence[len(prompt) :])
        assert draft == expected or any(rest[: len(draft)] == draft for rest in rests)
        sequence += draft[: data.draw(st.integers(0, len(draft)))] + data.draw(st.lists(st.integers(0, 3), max_size=1))


def test_a_right_draft_is_continued_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    history = AnswerHistory(1 << 20)
    history.add(key(0), list(range(100)))
    searches = []
    find = SortedContexts.find
    monkeypatch.setattr(SortedContexts, "find", lambda *args: searches.append(args) or find(*args))
    trail, sequence = Trail(), list(range(10))
    for stop in (10, 14, 15, 20):
        sequence += range(len(sequence), stop)
        assert history.draft(key(0), sequence, 4, trail=trail) == list(range(stop, stop + 4))
    assert len(searches) == 1
    sequence += [20, 99, 22, 23]  # the second was not right
    assert history.draft(key(0), sequence, 4, trail=trail) == list(range(24, 28))
    sequence += [7, 7]
    assert history.draft(key(0), sequence, 4, trail=trail) == []
    assert history.draft(key(0), [*sequence, 97, 98], 4, trail=trail) == [99]
    assert len(searches) == 4


def test_the_trail_of_an_older_index_is_not_followed() -> None:
    history = AnswerHistory(1 << 20)
    history.add(key(0), [1, 2, 3, 4])
    trail = Trail()
    assert history.draft(key(0), [1, 2], 1, trail=trail) == [3]
    history.add(key(0), [1, 2, 3, *range(50, 90)])
    assert history.draft(key(0), [1, 2, 3], 2, trail=trail) == [50, 51]


def test_a_repeated_answer_is_drafted_in_full_length() -> None:
    history = AnswerHistory(1 << 20)
    loop = [1, 2, 3] * 20
    history.follow(key(0), 7, loop, start=0)
    assert history.draft(key(0), loop, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_drafts_from_running_siblings() -> None:
    history = AnswerHistory(1 << 20)
    sibling = [9, 9, 1, 2, 3, 4, 5, 6]
    history.follow(key(0), 7, sibling, start=2)
    assert history.draft(key(0), [], 3) == [1, 2, 3]
    sibling += list(range(100, 140))
    assert history.draft(key(0), [4, 5, 6], 3) == [100, 101, 102]
    assert history.draft(key(1), [4, 5, 6], 3) == []
    history.unfollow(key(0), 7)
    history.end_step()
    assert history.draft(key(0), [], 3) == []
    assert lengths(history, key(0)) == []


def test_memory_is_bounded_and_the_least_recently_used_go_first() -> None:
    history = AnswerHistory(100_000)
    for number in range(100):
        history.add(key(number), np.arange(1000))
        history.add(key(0), np.arange(10))
        assert history.num_bytes <= 100_000
    assert lengths(history, key(0))
    assert lengths(history, key(99)) == [1000]
    assert lengths(history, key(1)) == []
    assert len(history) < 25


@pytest.mark.parametrize(("num_answers", "length"), [(1, 10), (8, 10), (8, 100), (2, 1000)])
@pytest.mark.parametrize("with_index", [False, True])
def test_counted_memory_is_what_is_allocated(num_answers: int, length: int, with_index: bool) -> None:
    history = AnswerHistory(1 << 30)
    answers = [list(range(place, place + length)) for place in range(num_answers)]
    tracemalloc.start()
    for number in range(100):
        for answer in answers:
            history.add(key(number), answer)
        if with_index:
            history.draft(key(number), [1, 2], 4)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert history.num_bytes == pytest.approx(allocated, rel=0.2)


def test_indices_are_part_of_the_bound() -> None:
    history = AnswerHistory(100_000)
    for number in range(20):
        history.add(key(number), np.arange(1000))
    without = history.num_bytes
    assert len(history) == 20 and without > 80_000
    assert history.draft(key(7), [1, 2], 2) == [3, 4]
    assert history.num_bytes <= 100_000
    assert lengths(history, key(0)) == [] and lengths(history, key(7)) == lengths(history, key(19)) == [1000]
    history.end_step()
    assert history.num_bytes == without * len(history) / 20


def test_the_end_of_a_step_costs_nothing_for_prompts_it_did_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    history = AnswerHistory(1 << 20)
    for number in range(50):
        history.add(key(number), [1, 2, 3, 4])
    history.end_step()
    history.add(key(5), [1, 2, 3, 4])
    history.draft(key(7), [1, 2], 2)
    counted: list[PromptAnswers] = []
    monkeypatch.setattr(AnswerHistory, "_count", lambda self, prompt: counted.append(prompt))
    history.end_step()
    assert {id(prompt) for prompt in counted} == {id(history._prompts[key(number)]) for number in (5, 7)}
    assert all(prompt.index is None for prompt in history._prompts.values())


def test_a_prompt_whose_index_is_above_the_bound_is_dropped() -> None:
    history = AnswerHistory(1000)
    history.follow(key(0), 7, list(range(1000)), start=0)
    history.draft(key(0), [1, 2], 2)
    assert (len(history), history.num_bytes) == (0, 0)
    assert history.draft(key(0), [1, 2], 2) == []


def test_the_latest_answers_are_kept() -> None:
    history = AnswerHistory(1 << 20)
    for length in range(MAX_ANSWERS + 5):
        history.add(key(0), [1] * length)
    assert lengths(history, key(0)) == list(range(5, MAX_ANSWERS + 5))


def test_an_answer_above_the_bound_is_not_kept() -> None:
    history = AnswerHistory(1000)
    history.add(key(0), [1] * 1000)
    assert history.num_bytes == 0
    assert history.draft(key(0), [1, 1, 1], 4) == []


def test_state_survives_a_round_trip() -> None:
    history = AnswerHistory(1 << 20)
    history.add(key(0), [1, 2, 3, 4])
    history.add(key(1), [])
    history.add(key(0), [5, 6, 7, 8])
    again = AnswerHistory(1 << 20)
    for _ in range(2):  # the second time nothing is new
        again.add_state(state_file.from_bytes(state_file.to_bytes(history.state_dict(), "history")))
    assert lengths(again, key(0)) == [4, 4]
    assert again.num_bytes == history.num_bytes
    assert again.draft(key(0), [5, 6], 4) == [7, 8]
    again.clear()
    again.add_state(AnswerHistory(0).state_dict())
    assert len(again) == 0


def test_keys_tell_prompts_apart() -> None:
    first, second = (GenerationRequest(ids, SamplingParams()) for ids in ([1, 2], [1, 3]))
    assert len(prompt_key(first)) == KEY_BYTES
    assert prompt_key(first) != prompt_key(second)
    assert prompt_key(first) == prompt_key(GenerationRequest([1, 2], SamplingParams(temperature=0.5), seed=3))
