"""What each decode slot drafts from, as it stands on the device."""

import pytest
import torch

from lockstep.engines.rollout.embedded.history import MAX_ANSWERS, AnswerHistory
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.protocol.generation import GenerationRequest, SamplingParams
from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.engines.rollout.embedded.cuda.draft_texts import MAX_LIVE, DraftTexts  # noqa: E402
from lockstep.kernels.draft_search import LIVE, MAX_SEGMENTS  # noqa: E402
from lockstep.kernels.draft_settings import MAX_MATCH, START  # noqa: E402

pytestmark = pytest.mark.gpu
MAX_ANSWER = 12
Segment = tuple[int, ...] | str
"""The tokens of an ended answer, or the name of a slot."""


class Texts:
    """The texts of a few slots, and the history that they read. max_ended: places for ended answers."""

    def __init__(self, num_slots: int = 4, max_ended: int = 1000) -> None:
        self.history = AnswerHistory(1 << 20)
        self.texts = DraftTexts(self.history, num_slots, MAX_ANSWER, DEVICE, max_ended)
        self.num_sequences = 0

    def sequence(self, prompt: int, tokens: list[int] | None = None) -> Sequence:
        """A new one, with what was generated so far."""
        request = GenerationRequest([prompt, 1, 2], SamplingParams(max_tokens=MAX_ANSWER), seed=0)
        sequence = Sequence(self.num_sequences, self.num_sequences, request, frozenset(), 0)
        self.num_sequences += 1
        if tokens:
            sequence.append(tokens, [0.0] * len(tokens))
        return sequence

    def add(self, sequence: Sequence, answer: list[int]) -> None:
        self.history.add(sequence.prompt_key, answer)

    def end(self, sequence: Sequence, answer: list[int]) -> None:
        """The host has read the whole answer."""
        sequence.append(answer, [0.0] * len(answer))
        sequence.stop_reason = "stop"
        self.add(sequence, answer)

    def update(self, slots: dict[int, Sequence]) -> None:
        self.texts.update(list(slots.values()), list(slots))

    def segments(self, slot: int) -> list[Segment]:
        """What the slot drafts from, in order. A text has START tokens before it."""
        segments: list[Segment] = []
        for first, stop in self.texts.segments[slot].tolist():
            if stop == LIVE:
                segments.append(f"slot {first}")
            elif stop > first:
                assert self.texts.tokens[first - MAX_MATCH : first].tolist() == [START] * MAX_MATCH
                segments.append(tuple(self.texts.tokens[first:stop].tolist()))
        return segments

    def text(self, slot: int) -> list[int]:
        first = slot * self.texts.width + MAX_MATCH
        assert self.texts.tokens[first - MAX_MATCH : first].tolist() == [START] * MAX_MATCH
        tokens: list[int] = self.texts.tokens[first : first + int(self.texts.lengths[slot])].tolist()
        return tokens


def test_siblings_draft_from_each_other() -> None:
    """The own text is the last. Those of other prompts are no siblings."""
    texts = Texts()
    a, b, c, d = (texts.sequence(prompt) for prompt in (0, 5, 0, 0))
    texts.update({3: a, 1: b})
    assert texts.segments(3) == ["slot 3"] and texts.segments(1) == ["slot 1"]
    texts.update({0: c, 2: d})
    for slot, others in {3: {"slot 0", "slot 2"}, 0: {"slot 3", "slot 2"}, 2: {"slot 3", "slot 0"}}.items():
        assert set(texts.segments(slot)[:-1]) == others and texts.segments(slot)[-1] == f"slot {slot}"
    assert texts.segments(1) == ["slot 1"]
    assert all(texts.text(slot) == [] for slot in range(4))


def test_ended_answers_are_uploaded_once() -> None:
    """The latest last, before the texts that still grow."""
    texts = Texts()
    a, b = texts.sequence(0), texts.sequence(5)
    texts.add(a, [1, 2, 3])
    texts.add(b, [4, 5])
    texts.add(a, [6])
    texts.update({0: a})
    assert texts.segments(0) == [(1, 2, 3), (6,), "slot 0"]
    places = texts.texts.segments[0, :2].tolist()
    texts.texts.tokens[places[0][0]] = 77  # stays as it is: not uploaded again
    texts.add(a, [8, 9])
    texts.update({0: a, 1: b})
    assert texts.segments(0) == [(77, 2, 3), (6,), (8, 9), "slot 0"]
    assert texts.segments(1) == [(4, 5), "slot 1"]
    assert texts.texts.segments[0, :2].tolist() == places
    texts.update({0: a, 1: b, 2: texts.sequence(0)})
    assert texts.segments(2) == [(77, 2, 3), (6,), (8, 9), "slot 0", "slot 2"]


def test_an_update_without_news_writes_nothing() -> None:
    texts = Texts()
    running = {0: texts.sequence(0), 1: texts.sequence(0)}
    texts.add(running[0], [1, 2])
    texts.update(running)
    for tensor in (texts.texts.tokens, texts.texts.lengths, texts.texts.segments, texts.texts.row_rates):
        tensor.fill_(55)
    texts.update(running)
    for tensor in (texts.texts.tokens, texts.texts.lengths, texts.texts.segments, texts.texts.row_rates):
        assert tensor.eq(55).all()


def test_answers_that_ended_are_no_longer_drafted_from_in_their_slots() -> None:
    texts = Texts()
    a, b, c = (texts.sequence(0) for _ in range(3))
    texts.update({0: a, 1: b, 2: c})
    texts.end(b, [3, 4])
    texts.update({0: a, 2: c})
    assert texts.segments(0) == [(3, 4), "slot 2", "slot 0"]
    assert texts.segments(2) == [(3, 4), "slot 0", "slot 2"]


@pytest.mark.parametrize("brings_answers", [False, True])
def test_answers_that_end_before_an_update_of_others_are_drafted_from(brings_answers: bool) -> None:
    """An update with new sequences alone, as for their first tokens, comes between; they may have answers of their own."""
    texts = Texts()
    a, b, c = texts.sequence(0), texts.sequence(0), texts.sequence(5)
    texts.update({0: a, 1: b})
    texts.end(b, [3, 4])
    texts.update({2: c})
    if brings_answers:
        texts.add(c, [6])
    texts.update({0: a, 2: c})
    assert texts.segments(0) == [(3, 4), "slot 0"]
    assert texts.segments(2) == ([(6,), "slot 2"] if brings_answers else ["slot 2"])


def test_a_slot_changes_its_sequence() -> None:
    """Its text begins again, its rate is unknown, and siblings of the old one do not draft from it."""
    texts = Texts()
    a, b = texts.sequence(0), texts.sequence(0)
    texts.update({0: a, 1: b})
    texts.texts.lengths[:2] = torch.tensor([5, 7])
    texts.texts.row_rates[:2] = 3.0
    texts.end(b, [3, 4])
    new = texts.sequence(5)
    texts.update({1: new})
    assert texts.texts.lengths[:2].tolist() == [5, 0]
    assert texts.texts.row_rates[:2].tolist() == [[3.0, 3.0], [0.0, 0.0]]
    assert texts.segments(0) == [(3, 4), "slot 0"] and texts.segments(1) == ["slot 1"]


@pytest.mark.parametrize("slot", [1, 2])
def test_a_preempted_sequence_returns_with_its_tokens(slot: int) -> None:
    """In the same slot, or in another one while nobody has its old slot."""
    texts = Texts()
    a, b = texts.sequence(0), texts.sequence(0)
    texts.update({0: a, 1: b})
    b.append([3, 4, 5], [0.0] * 3)
    b.num_preempted += 1
    texts.texts.lengths[1] = 3
    texts.texts.row_rates[:] = 3.0
    texts.update({0: a})
    b.append([6], [0.0])  # as from the prefill
    texts.update({slot: b})
    assert texts.text(slot) == [3, 4, 5, 6]
    assert texts.texts.row_rates[slot].tolist() == [0.0, 0.0]
    assert texts.segments(0) == [f"slot {slot}", "slot 0"]
    assert texts.segments(slot) == ["slot 0", f"slot {slot}"]


def test_answers_without_room_drop_all_and_those_of_current_prompts_come_again() -> None:
    """Room for three answers of 4 tokens."""
    texts = Texts(max_ended=3 * (MAX_MATCH + 4))
    a, b, c = texts.sequence(0), texts.sequence(5), texts.sequence(6)
    texts.add(a, [1] * 4)
    texts.add(b, [2] * 4)
    texts.add(c, [3] * 4)
    texts.add(c, [4] * 4)
    texts.update({0: a, 1: b})
    assert texts.segments(0) == [(1,) * 4, "slot 0"] and texts.segments(1) == [(2,) * 4, "slot 1"]
    texts.end(a, [5])
    texts.update({0: c, 1: b})
    assert texts.segments(1) == [(2,) * 4, "slot 1"]
    assert texts.segments(0) == [(3,) * 4, (4,) * 4, "slot 0"]
    texts.update({2: texts.sequence(0)})  # more than there is room for: as many as fit
    segments = [texts.segments(slot) for slot in range(3)]
    assert [each[-1] for each in segments] == ["slot 0", "slot 1", "slot 2"]
    ended = [segment for each in segments for segment in each[:-1]]
    assert len(ended) == 3 and set(ended) < {(1,) * 4, (2,) * 4, (3,) * 4, (4,) * 4, (5,)}


def test_an_answer_that_fills_the_room_is_uploaded() -> None:
    texts = Texts(max_ended=2 * MAX_MATCH + 7)
    a, b = texts.sequence(0), texts.sequence(5)
    texts.add(a, [1, 2, 3])
    texts.add(a, [4, 5, 6, 7])
    texts.update({0: a})
    assert texts.segments(0) == [(1, 2, 3), (4, 5, 6, 7), "slot 0"]
    texts.add(b, [8] * 9)
    texts.update({1: b})  # with a prompt whose answers fill the room already
    assert texts.segments(1)[-1] == "slot 1" and texts.segments(0)[-1] == "slot 0"


def test_most_siblings_and_answers() -> None:
    """Of more, the latest answers, and as many siblings as there is room for, always with the own text."""
    num_slots = MAX_LIVE + 5
    texts = Texts(num_slots)
    running = {slot: texts.sequence(0) for slot in range(num_slots)}
    for number in range(MAX_ANSWERS + 3):
        texts.add(running[0], [number])
    texts.update(running)
    for slot in range(num_slots):
        segments = texts.segments(slot)
        assert segments[:-MAX_LIVE] == [(number,) for number in range(3, MAX_ANSWERS + 3)]
        assert len(segments) == MAX_SEGMENTS and len(set(segments)) == MAX_SEGMENTS
        assert segments[-1] == f"slot {slot}" and all(isinstance(each, str) for each in segments[-MAX_LIVE:])


def test_clear_forgets_all_texts() -> None:
    """Sequences of the next round are new in their slots, and answers are uploaded again."""
    texts = Texts()
    a, b = texts.sequence(0), texts.sequence(0)
    texts.add(a, [1, 2])
    texts.update({0: a, 1: b})
    texts.texts.lengths[:] = 9
    texts.texts.clear()
    texts.texts.tokens[5 * texts.texts.width :] = START
    texts.update({0: a})
    assert texts.segments(0) == [(1, 2), "slot 0"]
    assert texts.text(0) == []


def test_a_room_that_the_current_prompts_fill_is_kept() -> None:
    """Each new answer that does not fit would else upload all of them again."""
    texts = Texts(max_ended=2 * (MAX_MATCH + 4))
    running = texts.sequence(0)
    for number in range(2):
        texts.add(running, [number] * 4)
    texts.update({0: running})
    kept = dict(texts.texts._ended)
    texts.add(running, [7] * 4)
    texts.update({0: running})
    assert texts.texts._ended == kept and texts.segments(0) == [(0,) * 4, (1,) * 4, "slot 0"]
