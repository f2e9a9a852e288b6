"""What a function of `api/` gets: the runs, and the parameters of the request."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote_plus

from lockstep.observability.dashboard.runs import RunFolder, Runs
from lockstep.observability.dashboard.talk_server import TalkServer
from lockstep.utils.untrusted import JSON_ERRORS

MOST_CHOSEN = 20
"""Runs that are shown together."""


class NotFound(ValueError):
    """What was asked for does not exist, or does not exist any more."""


@dataclass(frozen=True)
class ApiRequest:
    """params: of the URL's query, each as text; of a POST the texts of its body.
    body:   the JSON object that a POST sends.
    talk:   the server of a checkpoint.
    """

    runs: Runs
    params: Mapping[str, str]
    body: Mapping[str, Any] = field(default_factory=dict)
    talk: TalkServer = field(default_factory=TalkServer)

    def run(self, name: str = "run") -> RunFolder:
        """The run that a parameter names."""
        return self._named(self.text(name))

    def _named(self, wanted: str) -> RunFolder:
        found = self.runs.get(wanted)
        if found is None:
            raise NotFound(f"there is no run {wanted!r} (any more)")
        return found

    def several_runs(self) -> list[RunFolder]:
        """The runs that the parameter `runs` names: a JSON list."""
        try:
            names = json.loads(self.text("runs"))
        except JSON_ERRORS:
            names = None
        if not isinstance(names, list) or not 0 < len(names) <= MOST_CHOSEN:
            raise ValueError(f"runs: must be a JSON list of 1 to {MOST_CHOSEN} names")
        return [self._named(str(name)) for name in names]

    def text(self, name: str, default: str | None = None) -> str:
        value = self.params.get(name, default)
        if value is None:
            raise ValueError(f"the request lacks the parameter {name}")
        return value

    def number(self, name: str, default: int | None = None, low: int = 0, high: int = 2**53) -> int:
        text = self.text(name, None if default is None else str(default))
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{name}={text[:40]!r}: must be a number") from None
        if not low <= value <= high:
            raise ValueError(f"{name}={value}: must be {low} to {high}")
        return value


@dataclass(frozen=True)
class Stream:
    """An answer that is sent while it is made: each item is one event with JSON."""

    events: AsyncIterator[Any]


@dataclass(frozen=True)
class Recorded:
    """A request whose answer is part of an exported page.

    params: those that the page sends, in its order; narrowed: makes the answer that is shown, e.g. with only the recorded steps.
    """

    path: str
    params: Mapping[str, str]
    narrowed: Callable[[Any], Any] | None = None

    @property
    def url(self) -> str:
        """As the page's `URLSearchParams` writes it."""
        query = "&".join(
            f"{name}={quote_plus(value, safe='*', errors='replace').replace('~', '%7E')}"
            for name, value in self.params.items()
        )
        return f"{self.path}?{query}" if query else self.path


Api = Callable[[ApiRequest], Any]
"""Returns what is sent as JSON, or a Stream of it. ValueError is an answer too: its text is shown on the page."""

Recorder = Callable[[Sequence[RunFolder]], Iterable[Recorded]]
"""`recorded` of a module of `api/`: what it adds to an exported page, the most important first."""


def json_list(names: Iterable[str]) -> str:
    """As the page's `JSON.stringify` writes it."""
    return json.dumps(list(names), ensure_ascii=False, separators=(",", ":"))
