"""What a function of `api/` gets: the runs, and the parameters of the request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.observability.dashboard.runs import RunFolder, Runs


class NotFound(ValueError):
    """What was asked for does not exist, or does not exist any more."""


@dataclass(frozen=True)
class ApiRequest:
    """params: of the URL's query, each as text."""

    runs: Runs
    params: Mapping[str, str]

    def run(self, name: str = "run") -> RunFolder:
        """The run that a parameter names."""
        wanted = self.text(name)
        found = self.runs.get(wanted)
        if found is None:
            raise NotFound(f"there is no run {wanted!r} (any more)")
        return found

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


Api = Callable[[ApiRequest], Any]
"""Returns what is sent as JSON. ValueError is an answer too: its text is shown on the page."""
