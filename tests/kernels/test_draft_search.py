"""The best match of each sequence's last tokens against a search that compares every place of every text."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels import sampling  # noqa: E402
from lockstep.kernels.draft_search import (  # noqa: E402
    FOLLOWING_BITS,
    LANES,
    LIVE,
    MAX_SEGMENTS,
    PLACE_BITS,
    SEGMENT_BITS,
    find_drafts,
)
from lockstep.kernels.draft_settings import MAX_MATCH, START  # noqa: E402

pytestmark = pytest.mark.gpu
FREE = 1
"""Stands in the free places of a slot's text, where a search must not look."""
Match = tuple[int, int, int, int]
"""Tokens that match, following ones up to the longest draft, segment, and place of the first following token."""


@dataclass
class Texts:
    """
    live:     tokens of each slot's sequence.
    ended:    other texts.
    segments: of each slot: by number, the slot or the ended text that it drafts from.
    """

    live: list[list[int]]
    ended: list[list[int]] = field(default_factory=list)
    segments: list[dict[int, tuple[str, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.width = MAX_MATCH + max(map(len, self.live)) + 3
        self.stream: list[int] = []
        self.first: dict[tuple[str, int], int] = {}
        for slot, tokens in enumerate(self.live):
            self._add(("live", slot), tokens + [FREE] * (self.width - MAX_MATCH - len(tokens)))
        for number, tokens in enumerate(self.ended):
            self._add(("ended", number), tokens)

    def _add(self, name: tuple[str, int], tokens: list[int]) -> None:
        self.first[name] = len(self.stream) + MAX_MATCH
        self.stream += [START] * MAX_MATCH + tokens

    def tokens(self, name: tuple[str, int]) -> list[int]:
        kind, number = name
        return self.live[number] if kind == "live" else self.ended[number]

    def find(self, slot_ids: list[int], max_draft: int, inactive: tuple[int, ...] = ()) -> list[Match | None]:
        """By the kernel: the best of all lanes."""
        num_slots = len(self.live)
        segments = torch.zeros(num_slots, MAX_SEGMENTS, 2, dtype=torch.int64)
        for slot, named in enumerate(self.segments):
            for number, (kind, text) in named.items():
                first = self.first[kind, text]
                place = (text, LIVE) if kind == "live" else (first, first + len(self.ended[text]))
                segments[slot, number] = torch.tensor(place)
        state = torch.zeros(num_slots, sampling.STOPS + 1, dtype=torch.int64)
        state[:, sampling.ACTIVE] = 1
        state[list(inactive), sampling.ACTIVE] = 0
        found = torch.full((len(slot_ids) + 1, LANES), 7, dtype=torch.int64, device=DEVICE)
        find_drafts(
            torch.tensor(self.stream, dtype=torch.int32, device=DEVICE),
            torch.tensor([len(tokens) for tokens in self.live], dtype=torch.int32, device=DEVICE),
            segments.to(DEVICE),
            state.to(DEVICE),
            torch.tensor(slot_ids, dtype=torch.int32, device=DEVICE),
            found,
            width=self.width,
            max_draft=max_draft,
        )
        assert found[-1].tolist() == [7] * LANES  # of no row
        return [unpacked(best) for best in found[:-1].amax(1).tolist()]

    def expected(self, slot_ids: list[int], max_draft: int, inactive: tuple[int, ...] = ()) -> list[Match | None]:
        return [None if slot in inactive else self._best(slot, max_draft) for slot in slot_ids]

    def _best(self, slot: int, max_draft: int) -> Match | None:
        wanted = ([START] * MAX_MATCH + self.live[slot])[-MAX_MATCH:][::-1]
        matches = [
            (num_equal(context(tokens, place), wanted), min(max_draft, len(tokens) - place), number, first + place)
            for number, name in self.segments[slot].items()
            for tokens, first in [(self.tokens(name), self.first[name])]
            for place in range(len(tokens))
        ]
        best = max(matches, default=(0, 0, 0, 0))
        return best if best[0] else None


def context(tokens: list[int], place: int) -> list[int]:
    """The MAX_MATCH tokens before a place of a text, the last one first."""
    before = tokens[max(0, place - MAX_MATCH) : place][::-1]
    return before + [START] * (MAX_MATCH - len(before))


def num_equal(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def unpacked(best: int) -> Match | None:
    digits = []
    for bits in (PLACE_BITS, SEGMENT_BITS, FOLLOWING_BITS):
        digits.append(best % (1 << bits))
        best >>= bits
    place, segment, following = digits
    return (best, following, segment, place) if best else None


@pytest.mark.parametrize(("vocabulary", "max_draft"), [(1, 3), (2, 1), (2, 5), (2, 1000), (3, 8), (6, 4)])
def test_the_best_match(vocabulary: int, max_draft: int) -> None:
    """Slots draft from themselves, from others and from ended texts, in any segments; some texts are empty, some rows inactive."""
    rng = random.Random(f"{vocabulary} {max_draft}")

    def text() -> list[int]:
        return rng.choices(range(vocabulary), k=rng.choice([0, 1, rng.randrange(40), rng.randrange(40)]))

    live, ended = [text() for _ in range(7)], [text() for _ in range(9)]
    names = [("live", slot) for slot in range(7)] + [("ended", number) for number in range(9)]
    segments = []
    for slot in range(7):
        chosen = [*rng.sample(names, rng.randrange(1, 12)), ("live", slot)]
        segments.append(dict(zip(rng.sample(range(MAX_SEGMENTS), len(chosen)), chosen)))
    texts = Texts(live, ended, segments)
    slot_ids = [3, 0, 6, 5, 1, 2]
    assert texts.find(slot_ids, max_draft, inactive=(5,)) == texts.expected(slot_ids, max_draft, inactive=(5,))


def test_texts_longer_than_a_block() -> None:
    """Matches lie across the borders of blocks of 1024 tokens, and the best ones in any block."""
    rng = random.Random(4)
    long, own = rng.choices(range(2), k=2600), rng.choices(range(2), k=1100)
    live = [own, long[1000:1030], long[2030:2060], long[2594:], []]
    texts = Texts(live, [long, long[:1024], long[:1025]], [{5: ("ended", 0), 6: ("live", 0)} for _ in live])
    texts.segments[0][3] = ("ended", 2)
    texts.segments[4] = {9: ("ended", 1), 2: ("ended", 2)}
    slot_ids = [0, 1, 2, 3, 4]
    found = texts.find(slot_ids, max_draft=6)
    assert found == texts.expected(slot_ids, max_draft=6)
    first = texts.first["ended", 0]
    assert found[1] == (MAX_MATCH, 6, 5, first + 1030)
    assert found[2] == (MAX_MATCH, 6, 5, first + 2060)


def test_of_equal_matches_the_one_that_most_tokens_follow_counts() -> None:
    """Up to the longest draft; then the latest segment, then the latest place."""
    ended = [[5, 1, 2, 7, 8, 9], [6, 1, 2, 7], [4, 1, 2, 7, 8, 9], [3, 1, 2, 0, 1, 2, 0]]
    texts = Texts([[0, 1, 2]], ended, [{8: ("ended", 0), 9: ("ended", 1), 16: ("ended", 2)}])
    assert texts.find([0], max_draft=3) == [(2, 3, 16, texts.first["ended", 2] + 3)]
    texts.segments = [{8: ("ended", 0), 9: ("ended", 1), 16: ("ended", 1)}]
    assert texts.find([0], max_draft=3) == [(2, 3, 8, texts.first["ended", 0] + 3)]
    assert texts.find([0], max_draft=1) == [(2, 1, 16, texts.first["ended", 1] + 3)]
    texts.segments = [{8: ("ended", 0), 9: ("ended", 3)}]  # a longer match than any
    assert texts.find([0], max_draft=3) == [(3, 1, 9, texts.first["ended", 3] + 6)]


def test_a_match_that_begins_both_texts_is_the_longest() -> None:
    texts = Texts([[1, 2], []], [[0, 0, 1, 2, 3, 4, 5], [1, 2, 9]], [{0: ("ended", 0), 1: ("ended", 1)}] * 2)
    second = texts.first["ended", 1]
    assert texts.find([0], max_draft=8) == [(MAX_MATCH, 1, 1, second + 2)]
    assert texts.find([1], max_draft=2) == [(MAX_MATCH, 2, 1, second)]


def test_a_token_that_is_nowhere_else_has_no_match() -> None:
    """Its own last token is followed by none; nor do the free places of a text count."""
    texts = Texts([[0, FREE], [2, 3]], [[0, 0, 0]], [{0: ("live", 0), 3: ("ended", 0), 7: ("live", 1)}, {}])
    assert texts.find([0, 1], max_draft=4) == [None, None]
