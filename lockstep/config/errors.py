"""What is wrong with a configuration: one record per problem, one error for all of them."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_VALUE = object()
"""Value of a problem that concerns the key itself."""


@dataclass(frozen=True)
class Problem:
    """One thing to fix.

    key:     dotted key, or the text of an override that could not be parsed.
    value:   the given value; NO_VALUE if there is none to show.
    message: what is allowed, and what to set instead.
    also:    other keys involved, for a check that compares several.
    literal: keep its keys as they are, also those that have short names.
    """

    key: str
    value: Any
    message: str
    also: tuple[str, ...] = ()
    literal: bool = False

    def __str__(self) -> str:
        given = self.key if self.value is NO_VALUE else f"{self.key}={show(self.value)}"
        return f"{given}: {self.message}"


class ConfigError(ValueError):
    """An invalid configuration; `problems` lists everything that is wrong with it.

    short: short name -> key; the text has the short names.
    """

    def __init__(self, problems: Sequence[Problem], short: Mapping[str, str] | None = None) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problems" if len(self.problems) > 1 else "1 problem"
        texts = [str(one) if one.literal else with_short_names(str(one), short or {}) for one in self.problems]
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  - {text}" for text in texts)]))


def with_short_names(text: str, short: Mapping[str, str]) -> str:
    """A message with short names in place of their keys."""
    names = {key: name for name, key in short.items()}
    pattern = "|".join(map(re.escape, names))
    return re.sub(rf"(?<![\w.])({pattern})(?!\w|\.\w)", lambda match: names[match[0]], text) if names else text


def show(value: Any) -> str:
    """A value as written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most similar to `name`, if any is similar enough."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)), None)
