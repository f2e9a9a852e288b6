"""Answers seen for each prompt, and drafts from them by suffix matching.

    add, follow ─► answers of a prompt ─► contexts, sorted ─► draft: the tokens that followed the longest context that matches

The context of a token is the `MAX_MATCH` tokens before it in its answer; before the first token it continues with START. So
contexts that match down to the start of the answer are equal, and a draft is possible from the first token on.
"""

import hashlib
import struct
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from lockstep.kernels.draft_settings import MAX_MATCH, START
from lockstep.protocol.generation import GenerationRequest
from lockstep.protocol.images import content_ids

MIN_MATCH = 2
"""Least tokens that must match for a draft: two, which one 64-bit number holds."""
MAX_ANSWERS = 32
"""Answers kept per prompt, the latest."""
KEY_BYTES = 16
"""Length of a prompt's key."""

_TOKEN_BYTES = 4
_CONTEXT_BYTES = _TOKEN_BYTES * MAX_MATCH
_PACK = struct.Struct(f">{MAX_MATCH}i").pack
_STARTS = (START,) * MAX_MATCH
_TOKEN_MASK = (1 << 8 * _TOKEN_BYTES) - 1
_ABOVE_ALL = b"\xff" * (_CONTEXT_BYTES + 1)
"""Sorts after the rest of every context."""
_PROMPT_BYTES = 400
_ANSWER_BYTES = 128
_INDEX_BYTES = 640
"""Bytes of the Python objects that hold a prompt, an answer and an index, without their contents."""

_NO_ANSWERS: list[np.ndarray] = []


EndedAnswers = dict[bytes, list[np.ndarray]]
"""By prompt. A list is replaced when an answer is added, so that this stays as it is."""


def prompt_key(request: GenerationRequest) -> bytes:
    """A digest of the prompt, with its images."""
    ids = request.prompt_ids if request.images is None else content_ids(request.prompt_ids, request.images)
    return hashlib.blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=KEY_BYTES).digest()


class SortedContexts:
    """The contexts of all tokens of some answers, in lexicographic order from the last token of each backwards.

    num_tokens: of all answers.
    stream:     the answers one after another, with START before each.
    """

    def __init__(self, answers: Sequence[np.ndarray]) -> None:
        self.num_tokens = sum(map(len, answers))
        start = np.full(MAX_MATCH, START, dtype=np.int32)
        self.stream = np.concatenate([part for answer in answers for part in (start, answer)] or [start])
        lengths = np.array([len(answer) for answer in answers], dtype=np.int64)
        ends = np.cumsum(lengths + MAX_MATCH)
        self._ends: list[int] = ends.tolist()  # of each answer in the stream
        places = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, lengths)] or [np.empty(0, np.int64)])
        backwards = np.ascontiguousarray(self.stream[::-1]).astype(">i4")
        self._backwards = backwards.tobytes()  # a context is a slice of it
        windows = np.lib.stride_tricks.sliding_window_view(backwards, MAX_MATCH)[len(backwards) - places]
        order = np.argsort(windows.view(f"S{_CONTEXT_BYTES}")[:, 0], kind="stable")
        self._places = array("i", places[order].astype(np.intc).tobytes())  # of the token after each context
        heads = np.ascontiguousarray(windows[order, :MIN_MATCH]).view(">u8")
        self._heads = array("Q", heads.astype(np.uint64).tobytes())  # the last MIN_MATCH tokens of each context

    @property
    def num_bytes(self) -> int:
        arrays = (self._places, self._heads)
        entries = sum(each.itemsize * len(each) for each in arrays)
        return _INDEX_BYTES + self.stream.nbytes + len(self._backwards) + entries

    def find(self, context: list[int], max_tokens: int) -> int | None:
        """The place in the stream of the tokens that followed the context with the longest match; None for less than MIN_MATCH.

        Of several, the latest that `max_tokens` tokens follow, or else the one that most follow.
        context: the last MAX_MATCH tokens, the last one first.
        """
        places = self._places
        head = (context[0] & _TOKEN_MASK) << 8 * _TOKEN_BYTES | (context[1] & _TOKEN_MASK)
        first = bisect_left(self._heads, head)
        last = bisect_right(self._heads, head, lo=first)
        if first == last:
            return None
        if last - first > 1:
            wanted = _PACK(*context)
            at = bisect_left(places, wanted, first, last, key=self._context)
            neighbours = places[max(first, at - 1) : min(at + 1, last)]
            matched = wanted[: _TOKEN_BYTES * max(_num_equal(wanted, self._context(place)) for place in neighbours)]
            first = bisect_left(places, matched, first, at, key=self._context)
            last = bisect_left(places, matched + _ABOVE_ALL, at, last, key=self._context)
        if last - first == 1:
            return places[first]
        found = np.frombuffer(places, np.intc)[first:last]
        ends = np.array(self._ends)
        num_left = np.minimum(ends[np.searchsorted(ends, found, side="right")] - found, max_tokens)
        return int(found[num_left == num_left.max()].max())

    def end_of(self, place: int) -> int:
        """Where the answer with the token at `place` of the stream ends."""
        return self._ends[bisect_right(self._ends, place)]

    def _context(self, place: int) -> bytes:
        """Before the token at `place` of the stream, its last token first."""
        begin = len(self._backwards) - place * _TOKEN_BYTES
        return self._backwards[begin : begin + _CONTEXT_BYTES]


def _num_equal(a: bytes, b: bytes) -> int:
    """Leading tokens that are equal."""
    difference = int.from_bytes(a, "big") ^ int.from_bytes(b, "big")
    return (8 * _CONTEXT_BYTES - difference.bit_length()) // (8 * _TOKEN_BYTES)


@dataclass(slots=True)
class Trail:
    """Where the last draft of a sequence came from. The next one continues there if its tokens were right.

    The longest match grows by every token that was right, so it is still one of the longest.

    index:      the place is in its stream.
    place, end: of the token after the `num_tokens` that the sequence had, and of the end of its answer.
    """

    index: SortedContexts | None = None
    place: int = 0
    end: int = 0
    num_tokens: int = 0

    def follow(self, tokens: list[int], max_tokens: int) -> list[int]:
        """The next `max_tokens` tokens; none if the new ones of the sequence were not those of the trail, or fewer are left.
        The trail has ended then."""
        index, self.index = self.index, None
        new = tokens[self.num_tokens :]
        stop = self.place + len(new) + max_tokens
        if index is None or stop > self.end:
            return []
        known: list[int] = index.stream[self.place : stop].tolist()
        if known[: len(new)] != new:
            return []
        self.index = index
        self.place += len(new)
        self.num_tokens = len(tokens)
        return known[len(new) :]

    def start(self, index: SortedContexts, place: int, num_tokens: int, max_tokens: int) -> list[int]:
        """The tokens from `place` on."""
        self.index, self.place, self.end, self.num_tokens = index, place, index.end_of(place), num_tokens
        tokens: list[int] = index.stream[place : min(place + max_tokens, self.end)].tolist()
        return tokens


@dataclass
class PromptAnswers:
    """What is known about one prompt.

    answers: ended ones, the latest last.
    running: tokens of sequences that still run, by their names, and where in them the answer starts. The lists grow.
    index:   of the tokens known when it was built; None if there is none.
    num_ended_tokens: of `answers`.
    num_searches: since it was known whether the index is stale.
    counted_bytes: its share of the history's `num_bytes`.
    """

    answers: list[np.ndarray] = field(default_factory=list)
    num_ended_tokens: int = 0
    running: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    index: SortedContexts | None = None
    num_searches: int = 0
    counted_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        index = 0 if self.index is None else self.index.num_bytes
        return _PROMPT_BYTES + sum(_ANSWER_BYTES + answer.nbytes for answer in self.answers) + index

    @property
    def is_stale(self) -> bool:
        """Whether half of the tokens are not in the index: sorting them takes longer than many steps."""
        if self.index is None:
            return True
        num_tokens = self.num_ended_tokens
        for tokens, start in self.running.values():
            num_tokens += len(tokens) - start
        known = self.index.num_tokens
        return num_tokens > known + max(16, known)

    def check_is_due(self) -> bool:
        """Whether to ask if the index is stale: once per as many searches as sequences run, since it counts the tokens of all."""
        self.num_searches += 1
        if self.index is not None and self.num_searches < len(self.running):
            return False
        self.num_searches = 0
        return True

    def build_index(self) -> None:
        running = [np.array(tokens[start:], dtype=np.int32) for tokens, start in self.running.values()]
        self.index = SortedContexts(self.answers + running)


class AnswerHistory:
    """Answers by prompt, with their indices within `max_bytes`: the least recently used prompts are dropped first.

    num_bytes: of ended answers and indices.
    index_s:   seconds spent on indices so far.
    version:   changes with the ended answers.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.index_s = 0.0
        self.version = 0
        self._prompts: OrderedDict[bytes, PromptAnswers] = OrderedDict()  # least recently used first
        self._used_now: set[bytes] = set()  # keys since the last `end_step`

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, key: bytes, tokens: Sequence[int] | np.ndarray) -> None:
        """An answer that has ended, by itself or not."""
        self.version += 1
        prompt = self._used(key)
        prompt.answers = [*prompt.answers, np.array(tokens, dtype=np.int32)][-MAX_ANSWERS:]
        prompt.num_ended_tokens = sum(map(len, prompt.answers))
        self._count(prompt)

    def answers(self, key: bytes) -> list[np.ndarray]:
        """Ended answers to a prompt, the latest last; the list never changes."""
        prompt = self._prompts.get(key)
        return _NO_ANSWERS if prompt is None else prompt.answers

    def follow(self, key: bytes, name: int, tokens: list[int], start: int) -> None:
        """Draft from a sequence that still runs, too. tokens: its own list, in which the answer begins at `start`."""
        self._used(key).running[name] = tokens, start

    def unfollow(self, key: bytes, name: int) -> None:
        prompt = self._prompts.get(key)
        if prompt is not None:
            prompt.running.pop(name, None)

    def has_answers(self, key: bytes, name: int) -> bool:
        """Whether there is another answer to the prompt than that of the running sequence `name`."""
        prompt = self._prompts.get(key)
        return prompt is not None and (bool(prompt.answers) or not prompt.running.keys() <= {name})

    def draft(
        self, key: bytes, tokens: list[int], max_tokens: int, start: int = 0, trail: Trail | None = None
    ) -> list[int]:
        """Up to `max_tokens` tokens that may follow.

        tokens: those of a sequence, in which the answer begins at `start`. trail: of that sequence.
        """
        prompt = self._prompts.get(key)
        if prompt is None or max_tokens < 1:
            return []
        if trail is None:
            trail = Trail()
        elif trail.index is prompt.index and (draft := trail.follow(tokens, max_tokens)):
            return draft  # most rows of most steps end here
        if prompt.check_is_due() and prompt.is_stale:
            began = time.perf_counter()
            prompt.build_index()
            self.index_s += time.perf_counter() - began
            self._count(self._used(key))
        assert prompt.index is not None
        tail = tokens[max(start, len(tokens) - MAX_MATCH) :]
        place = prompt.index.find([*reversed(tail), *_STARTS[len(tail) :]], max_tokens)
        return [] if place is None else trail.start(prompt.index, place, len(tokens), max_tokens)

    def end_step(self) -> None:
        """Drop indices and references to sequences; the answers stay."""
        for key in self._used_now:
            if (prompt := self._prompts.get(key)) is None:
                continue
            prompt.index = None
            prompt.running.clear()
            if prompt.answers:
                self._count(prompt)
            else:
                self.num_bytes -= self._prompts.pop(key).counted_bytes
        self._used_now.clear()

    def clear(self) -> None:
        self.version += 1
        self._prompts.clear()
        self._used_now.clear()
        self.num_bytes = 0

    def ended(self) -> EndedAnswers:
        """The answers that have ended so far; may be called while sequences run."""
        return {key: prompt.answers for key, prompt in list(self._prompts.items()) if prompt.answers}

    def state_dict(self, prompts: EndedAnswers | None = None) -> dict[str, Any]:
        """As plain data for `utils.state_file`. prompts: what `ended` gave earlier; None for all answers so far."""
        prompts = self.ended() if prompts is None else prompts
        answers = [answer for kept in prompts.values() for answer in kept]
        return {
            "keys": b"".join(prompts),
            "num_answers": [len(kept) for kept in prompts.values()],
            "lengths": [len(answer) for answer in answers],
            "tokens": np.concatenate(answers or [np.empty(0, np.int32)]),
        }

    def add_state(self, state: dict[str, Any]) -> None:
        """Add the answers of `state_dict` that are not here yet; the oldest beyond `max_bytes` are dropped."""
        bounds = np.cumsum(state["lengths"], dtype=np.int64)[:-1]
        answers = iter(np.split(np.asarray(state["tokens"], dtype=np.int32), bounds) if state["lengths"] else [])
        for place, num_answers in enumerate(state["num_answers"]):
            key = state["keys"][place * KEY_BYTES : (place + 1) * KEY_BYTES]
            for answer in islice(answers, num_answers):
                known = self._prompts[key].answers if key in self._prompts else []
                if not any(np.array_equal(answer, other) for other in known):
                    self.add(key, answer)

    def _used(self, key: bytes) -> PromptAnswers:
        prompt = self._prompts.setdefault(key, PromptAnswers())
        self._prompts.move_to_end(key)
        self._used_now.add(key)
        return prompt

    def _count(self, prompt: PromptAnswers) -> None:
        """Count the bytes of a prompt that has changed, and drop the least recently used prompts beyond the bound."""
        self.num_bytes += prompt.num_bytes - prompt.counted_bytes
        prompt.counted_bytes = prompt.num_bytes
        while self.num_bytes > self.max_bytes:
            _, dropped = self._prompts.popitem(last=False)
            self.num_bytes -= dropped.counted_bytes
