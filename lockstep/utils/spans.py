"""What this process did and when: named intervals, for the timeline of a step and as ranges in a running profile.

    with span("step"):                                             role controller, rank 0: step
        with span("update_actor", ("actor_rollout", rank)):        role actor_rollout: update_actor, a call of a worker
            with span("optimizer_step"): ...                       role actor_rollout: optimizer_step

Times are microseconds since 1970 by this machine's clock, read once and continued by the monotonic clock, so that spans nest even
if the clock is set. Recording a span takes a few microseconds.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MAX_SPANS = 20_000
"""Older spans are dropped, if nothing takes them."""

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
        track = self._own or self._outer or _process_track
        self._mark = None if _marker is None else _marker.mark(self._name, track, self._own is not None)
        if self._mark is not None:
            self._mark.__enter__()
        self._begin_ns = time.perf_counter_ns()

    def __exit__(self, *exception: object) -> None:
        end_us = (_EPOCH_NS + time.perf_counter_ns()) // 1000
        role, rank = self._own or self._outer or _process_track
        _spans.append(Span(self._name, role, rank, (_EPOCH_NS + self._begin_ns) // 1000, end_us))
        if self._own is not None:
            _call_track.set(self._outer)
        if self._mark is not None:
            self._mark.__exit__(None, None, None)


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


def set_track(role: str, rank: int) -> None:
    """The role and rank of spans outside of workers' calls."""
    global _process_track
    _process_track = (role, rank)


def set_marker(marker: Marker | None) -> None:
    """Mark spans in a profile from now on; None ends that."""
    global _marker
    _marker = marker
