"""YAML files that may be damaged or hostile, such as the config of a run that somebody sent."""

from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The fast one; PyYAML may be built without it."""
MOST_BYTES = 16 << 20
DEEPEST = 100
"""Nested parts: the fast loader ends the process if they are too many."""
MOST_ALIASES = 16
"""Each may double what the file means."""


def read_yaml(path: Path) -> Any:
    """The content; ValueError if it is not YAML, too large, nested too deeply or has too many aliases."""
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
    try:
        text = content.decode()
        _check(text)
        return yaml.load(text, LOADER)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _check(text: str) -> None:
    depth = aliases = 0
    for event in yaml.parse(text, LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        if aliases > MOST_ALIASES:
            raise ValueError(f"it has more than {MOST_ALIASES} aliases")
