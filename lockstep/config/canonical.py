"""Settings as users wrote them, brought to canonical spelling by the tables of `compat`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.compat import (
    ALIASES,
    NO_EFFECT,
    NOT_IN_BUILD,
    REFUSED_VALUES,
    UNSUPPORTED,
    VALUE_ALIASES,
    Unsupported,
)
from lockstep.config.errors import NO_VALUE, Problem, show
from lockstep.config.schema import explain_unknown_key, keys, sections

SWITCHED_OFF_BY_NULL = {"critic": "critic.enable", "actor_rollout_ref.ref": "actor_rollout_ref.ref.enable"}
"""Sections of models that a run may do without, to the key that says so."""

_SPELLED = {*ALIASES, *UNSUPPORTED, *NO_EFFECT}


@dataclass
class Layer:
    """One source of settings (a file, an override) in canonical spelling.

    values:      canonical key to value; only real keys.
    unsupported: canonical key to the problem with what it asks for, or None where it asks for nothing.
    problems:    unknown keys and contradictions.
    notices:     what was read differently from how it was written.
    idle:        key as written to the reason why it has no effect.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, Problem | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    idle: dict[str, str] = field(default_factory=dict)


def canonical_layer(cls: type, tree: Mapping[str, Any]) -> Layer:
    """Nested settings as a user wrote them (dotted names allowed anywhere), in the spelling of `cls`."""
    layer = Layer()
    spelled: dict[str, str] = {}
    for written, name, value in _settings(cls, tree, "", "", layer):
        value = _canonical_value(name, value, layer)
        if name in spelled and isinstance(value, Mapping) and isinstance(layer.values[name], Mapping):
            value = merged(layer.values[name], value)
        elif name in spelled and layer.values[name] != value:
            other = f"{spelled[name]}={show(layer.values[name])}"
            layer.problems.append(Problem(written, value, f"contradicts {other}, which sets the same thing"))
        spelled[name] = written
        layer.values[name] = value
    return layer


def merged(old: Any, new: Any) -> Any:
    """`new` over `old`, mappings key by key."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}


def canonical_name(cls: type, written: str) -> str:
    """The canonical spelling of a dotted key."""
    name = ""
    for part in written.split("."):
        name = f"{name}.{part}" if name else part
        name = _alias(cls, name) or name
    return name


def refused_values(values: Mapping[str, Any]) -> list[Problem]:
    """Problems with values, or items of lists, that name something which this build does not have."""
    problems = []
    for name, reasons in REFUSED_VALUES.items():
        value = values.get(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item in reasons:
                named = f"{item} is " if isinstance(value, list) else ""
                problems.append(Problem(name, value, f"{named}{NOT_IN_BUILD}: {reasons[item]}"))
    return problems


def _alias(cls: type, name: str) -> str | None:
    return None if name in keys(cls) or name in sections(cls) else ALIASES.get(name)


def _settings(
    cls: type, tree: Mapping[str, Any], written: str, name: str, layer: Layer
) -> Iterator[tuple[str, str, Any]]:
    """Every setting in `tree` as (key as written, canonical key, value); the rest goes to `layer`."""
    for part, value in tree.items():
        if "." in str(part):
            part, *rest = str(part).split(".")
            for below in reversed(rest):
                value = {below: value}
        if part == "_target_":
            continue
        written_here = f"{written}.{part}" if written else str(part)
        name_here = f"{name}.{part}" if name else str(part)
        target = _alias(cls, name_here)
        if target and _asks_for_nothing(value, target):
            continue
        if target:
            all_below = ".*" if isinstance(value, Mapping) else ""
            layer.notices.append(f"{written_here}{all_below} is read as {target}{all_below}")
        yield from _setting(cls, value, written_here, target or name_here, layer)


def _asks_for_nothing(value: Any, target: str) -> bool:
    """Whether another spelling of `target` is left open: null, or a value that only follows what is set elsewhere."""
    if value is None:
        return target not in SWITCHED_OFF_BY_NULL
    return isinstance(value, str) and value.startswith("${") and ("oc.select:" in value or target in value)


def _setting(cls: type, value: Any, written: str, name: str, layer: Layer) -> Iterator[tuple[str, str, Any]]:
    if name in keys(cls):
        yield written, name, value
    elif name in SWITCHED_OFF_BY_NULL and value is None:
        yield written, SWITCHED_OFF_BY_NULL[name], False
    elif name in sections(cls) and value is None:
        return
    elif isinstance(value, Mapping) and (name in sections(cls) or _holds_spellings(name)):
        yield from _settings(cls, value, written, name, layer)
    elif name in UNSUPPORTED:
        layer.unsupported.update(_asked(UNSUPPORTED[name], value, written, name))
    elif name in NO_EFFECT:
        if not _says_nothing(value):
            layer.idle[written] = NO_EFFECT[name]
    else:
        layer.problems.append(_unknown(cls, value, written, name))


def _holds_spellings(name: str) -> bool:
    return name not in UNSUPPORTED and name not in NO_EFFECT and any(key.startswith(f"{name}.") for key in _SPELLED)


def _says_nothing(value: Any) -> bool:
    """Whether a setting without effect is at rest: null, false, or following another key."""
    return value is None or value is False or (isinstance(value, str) and value.startswith("${"))


def _unknown(cls: type, value: Any, written: str, name: str) -> Problem:
    while isinstance(value, Mapping) and len(value) == 1:  # name a.b.c=1 in full, but a whole section once
        part, value = next(iter(value.items()))
        written, name = f"{written}.{part}", f"{name}.{part}"
    shown = NO_VALUE if isinstance(value, Mapping) else value
    return Problem(written, shown, explain_unknown_key(name, cls))


def _asked(entry: Unsupported, value: Any, written: str, name: str) -> Iterator[tuple[str, Problem | None]]:
    if isinstance(value, Mapping) and entry.switches:
        for switch in entry.switches:
            if switch in value:
                yield from _asked(entry, value[switch], f"{written}.{switch}", f"{name}.{switch}")
    else:
        yield name, Problem(written, value, entry.message) if entry.asks(value) else None


def _canonical_value(name: str, value: Any, layer: Layer) -> Any:
    if isinstance(value, str) and value in VALUE_ALIASES.get(name, {}):
        layer.notices.append(f"{name}={value} is read as {VALUE_ALIASES[name][value]}")
        return VALUE_ALIASES[name][value]
    return value
