"""What this process did and when: named intervals, for the timeline of a step and as ranges in a running profile.

    with span("step"):                                             role controller, rank 0: step
        with span("update_actor", ("actor_rollout", rank)):        role actor_rollout: update_actor, a call of a worker
            with span("optimizer_step"): ...                       role actor_rollout: optimizer_step

Times are microseconds since 1970 by this machine's clock, read once and continued by the monotonic clock, so that spans nest even
if the clock is set. Recording a span takes a few microseconds.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MAX_SPANS = 20_000
"""Older spans are dropped, if nothing takes them."""

NUM_RECENT = 30
"""Spans that are kept for reports, also if they are taken."""

Track = tuple[str, int]
"""A role and a rank of it."""


class Span(NamedTuple):
    """begin_us, end_us: microseconds since 1970."""

    name: str
    role: str
    rank: int
    begin_us: int
    end_us: int


class Marker(Protocol):
    """A running profile."""

    def mark(self, name: str, track: Track, is_call: bool) -> AbstractContextManager[None] | None:
        """What to enter during the span. is_call: the span is a call of a worker."""


_spans: deque[Span] = deque(maxlen=MAX_SPANS)
_recent: deque[Span] = deque(maxlen=NUM_RECENT)
_calls: dict[int, tuple[str, Track]] = {}
"""Calls of workers that have begun and not ended."""
_last_call: tuple[str, Track] | None = None
_num_ended: Counter[str] = Counter()
_process_track: Track = ("controller", 0)
_call_track: ContextVar[Track | None] = ContextVar("track", default=None)
"""That of the worker's call that this thread or coroutine is in."""
_marker: Marker | None = None
_EPOCH_NS = time.time_ns() - time.perf_counter_ns()


class span:
    """Record the block. track: the role and rank that a call of a worker is of; the enclosing span's by default."""

    __slots__ = ("_begin_ns", "_mark", "_name", "_outer", "_own")

    def __init__(self, name: str, track: Track | None = None) -> None:
        self._name, self._own = name, track

    def __enter__(self) -> None:
        self._outer = _call_track.get()
        if self._own is not None:
            _call_track.set(self._own)
            _calls[id(self)] = self._name, self._own
        track = self._own or self._outer or _process_track
        self._mark = None if _marker is None else _marker.mark(self._name, track, self._own is not None)
        if self._mark is not None:
            self._mark.__enter__()
        self._begin_ns = time.perf_counter_ns()

    def __exit__(self, *exception: object) -> None:
        end_us = (_EPOCH_NS + time.perf_counter_ns()) // 1000
        role, rank = self._own or self._outer or _process_track
        ended = Span(self._name, role, rank, (_EPOCH_NS + self._begin_ns) // 1000, end_us)
        _spans.append(ended)
        _recent.append(ended)
        _num_ended[self._name] += 1
        if self._own is not None:
            _call_track.set(self._outer)
            _end_call(self)
        if self._mark is not None:
            self._mark.__exit__(None, None, None)


def _end_call(call: span) -> None:
    global _last_call
    _last_call = _calls.pop(id(call), _last_call)


def spanned(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose calls are spans."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with span(function.__name__):
            return function(*args, **kwargs)

    return call


def take_spans() -> list[Span]:
    """The spans that ended since the last call, in the order of their ends."""
    taken = []
    while _spans:
        taken.append(_spans.popleft())
    return taken


def recent_spans() -> list[Span]:
    """The last spans that ended, whether they were taken or not."""
    return list(_recent)


def open_calls() -> list[tuple[str, Track]]:
    """Calls of workers that are running in this process."""
    return list(_calls.values())


def last_call() -> tuple[str, Track] | None:
    """The call of a worker that ended last in this process."""
    return _last_call


def num_ended(without: frozenset[str] = frozenset()) -> int:
    """How many spans have ended in this process. without: names that do not count."""
    return sum(count for name, count in _num_ended.copy().items() if name not in without)


def set_track(role: str, rank: int) -> None:
    """The role and rank of spans outside of workers' calls."""
    global _process_track
    _process_track = (role, rank)


def set_marker(marker: Marker | None) -> None:
    """Mark spans in a profile from now on; None ends that."""
    global _marker
    _marker = marker
