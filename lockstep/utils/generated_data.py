"""Data that a package makes instead of a file: an entry `SOURCE:NAME[?option=value&...]` of `data.train_files` or `data.val_files`.

reasoning_gym:chain_sum?min_terms=2&seed=3   problems of a task of reasoning-gym
verifiers:gsm8k-v1                           the tasks of a verifiers environment
"""

import importlib.util
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

EXTRAS = {"reasoning_gym": "environments", "verifiers": "verifiers"}
"""Source, which is also the package that it needs, and the extra that installs it."""


@dataclass(frozen=True)
class GeneratedData:
    """options: as JSON values if they are, else text."""

    entry: str
    source: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)


def is_generated(entry: Any) -> bool:
    return str(entry).partition(":")[0] in EXTRAS


def parse_generated(entry: str) -> GeneratedData:
    """ValueError, without the config key, if the entry cannot be read or its package is not installed."""
    source, _, rest = entry.partition(":")
    name, _, query = rest.partition("?")
    if not name:
        raise ValueError(f"names nothing; write {source}:NAME or {source}:NAME?option=value&option=value")
    options: dict[str, Any] = {}
    for part in query.split("&") if query else ():
        option, has_value, value = part.partition("=")
        if not option or not has_value:
            raise ValueError(f"{part!r} is not option=value; write {source}:{name}?option=value&option=value")
        options[option] = _value(unquote(value))
    if importlib.util.find_spec(source) is None:
        raise ValueError(f"{source} is not installed: pip install 'lockstep-rl[{EXTRAS[source]}]'")
    return GeneratedData(entry, source, name, options)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
