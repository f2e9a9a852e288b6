"""Bring settings as users write them to canonical spelling, by the compatibility tables of each program."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from lockstep.config import compat, generation_compat, sft_compat
from lockstep.config.compat import NOT_SUPPORTED, Tables, Unsupported
from lockstep.config.errors import NO_VALUE, Problem, show
from lockstep.config.evaluation import EvaluationConfig
from lockstep.config.generation import GenerationConfig
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.schema import explain_unknown_key, keys, sections
from lockstep.config.sft import SFTConfig
from lockstep.config.short_names import short_setting, suggestion

DISABLED_BY_NULL = {"critic": "critic.enable", "actor_rollout_ref.ref": "actor_rollout_ref.ref.enable"}
"""Sections that `section=null` turns off, and the key that does it."""


TABLES: dict[type, Tables] = {
    SFTConfig: sft_compat.TABLES,
    RMConfig: sft_compat.PREFERENCE_TABLES,
    DPOConfig: sft_compat.PREFERENCE_TABLES,
    GenerationConfig: generation_compat.GENERATION,
    EvaluationConfig: generation_compat.EVALUATION,
}
"""Root config class to its tables; those of PPO for every other."""


def tables_of(cls: type) -> Tables:
    """The compatibility tables of a root config class."""
    return TABLES.get(cls, compat.TABLES)


@dataclass
class Layer:
    """One source of settings (a file or an override) in canonical spelling.

    values:      canonical key to value; only keys that exist.
    unsupported: canonical key to its problem, or None if the value does not request anything.
    problems:    unknown keys and contradictions.
    notices:     aliases that were applied.
    no_effect:   key as written to the reason why it has no effect.
    short:       short names that were used, each to its key.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, Problem | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    no_effect: dict[str, str] = field(default_factory=dict)
    short: dict[str, str] = field(default_factory=dict)


def normalize(cls: type, tree: Mapping[str, Any], short_names: bool = False) -> Layer:
    """Nested settings as a user wrote them (dotted names allowed anywhere), in the spelling of `cls`.

    short_names: names such as `lr` are keys of ours, not of the program that has the settings.
    """
    layer = Layer()
    written_as: dict[str, str] = {}
    short: list[tuple[str, str, Any]] = []
    if short_names:
        tree, short = _take_short(cls, tree)
        layer.short = {written: name for written, name, _ in short}
    for written, name, value in chain(short, _settings(cls, tree, "", "", layer)):
        value = _normalize_value(cls, name, value, layer)
        if name in written_as and isinstance(value, Mapping) and isinstance(layer.values[name], Mapping):
            value = merge(layer.values[name], value)
        elif name in written_as and not is_same(layer.values[name], value):
            layer.problems.append(contradiction(written, value, written_as[name], layer.values[name]))
        written_as[name] = written
        layer.values[name] = value
    return layer


def _take_short(cls: type, tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """The settings without those under short names, and these as (short name, key, value)."""
    rest: dict[str, Any] = {}
    found = []
    for written, value in tree.items():
        name, *below = str(written).split(".")
        for part in reversed(below):
            value = {part: value}
        if (short := short_setting(cls, name, value)) is not None:
            found.append((name, *short))
        else:
            rest[written] = tree[written]
    return rest, found


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of a key are equal; a list of one may be written without brackets."""
    one, other = ([value] if isinstance(value, str) else value for value in (one, other))
    return bool(one == other)


def contradiction(written: str, value: Any, other: str, other_value: Any) -> Problem:
    message = f"contradicts {other}={show(other_value)}; both set the same key"
    return Problem(written, value, message, literal=True)


def merge(old: Any, new: Any) -> Any:
    """`new` over `old`; mappings are merged key by key."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: merge(old.get(key), value) for key, value in new.items()}}


def canonical_name(cls: type, written: str) -> str:
    """The canonical spelling of a dotted key."""
    name = ""
    for part in written.split("."):
        name = f"{name}.{part}" if name else part
        name = _alias(cls, name) or name
    return name


def unsupported_values(cls: type, values: Mapping[str, Any]) -> list[Problem]:
    """Problems with values, or items of lists, that select an unsupported feature."""
    problems = []
    for name, reasons in tables_of(cls).unsupported_values.items():
        value = values.get(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item in reasons:
                item_name = f"{item} is " if isinstance(value, list) else ""
                problems.append(Problem(name, value, f"{item_name}{NOT_SUPPORTED}: {reasons[item]}"))
    return problems


def _alias(cls: type, name: str) -> str | None:
    return None if name in keys(cls) or name in sections(cls) else tables_of(cls).aliases.get(name)


def _settings(
    cls: type, tree: Mapping[str, Any], written: str, name: str, layer: Layer
) -> Iterator[tuple[str, str, Any]]:
    """Every setting in `tree` as (key as written, canonical key, value); everything else is added to `layer`."""
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
        if target and _is_unset_alias(cls, value, target):
            continue
        if target:
            all_below = ".*" if isinstance(value, Mapping) else ""
            layer.notices.append(f"{written_here}{all_below} is read as {target}{all_below}")
        yield from _setting(cls, value, written_here, target or name_here, layer)


def _is_unset_alias(cls: type, value: Any, target: str) -> bool:
    """Whether an alias of `target` sets nothing: null, or an interpolation that follows the canonical key or another alias."""
    if value is None:
        return target not in DISABLED_BY_NULL
    if not isinstance(value, str) or not value.startswith("${"):
        return False
    return "oc.select:" in value or target in value or value[2:-1] in tables_of(cls).aliases


def _setting(cls: type, value: Any, written: str, name: str, layer: Layer) -> Iterator[tuple[str, str, Any]]:
    tables = tables_of(cls)
    if name in keys(cls):
        if not _follows(value, name):
            yield written, name, value
    elif DISABLED_BY_NULL.get(name) in keys(cls) and value is None:
        yield written, DISABLED_BY_NULL[name], False
    elif name in sections(cls) and value is None:
        return
    elif isinstance(value, Mapping) and (name in sections(cls) or _is_section_of_tables(tables, name)):
        yield from _settings(cls, value, written, name, layer)
    elif name in tables.unsupported_keys:
        layer.unsupported.update(_unsupported(tables.unsupported_keys[name], value, written, name))
    elif name in tables.no_effect:
        if not _is_off(value):
            layer.no_effect[written] = tables.no_effect[name]
    else:
        layer.problems.append(_unknown(cls, value, written, name))


def _follows(value: Any, name: str) -> bool:
    """Whether the value is `${oc.select:name}`, as in a role's section of verl that is read as the one it follows."""
    return isinstance(value, str) and value.startswith((f"${{oc.select:{name},", f"${{oc.select:{name}}}"))


def _is_section_of_tables(tables: Tables, name: str) -> bool:
    in_tables = any(key.startswith(f"{name}.") for key in tables.keys)
    return in_tables and name not in tables.unsupported_keys and name not in tables.no_effect


def _is_off(value: Any) -> bool:
    """Whether a setting without effect needs no notice: null, false, empty, an interpolation, or a section of such."""
    if isinstance(value, Mapping):
        return all(map(_is_off, value.values()))
    return value is None or value is False or value == "" or (isinstance(value, str) and value.startswith("${"))


def _unknown(cls: type, value: Any, written: str, name: str) -> Problem:
    while isinstance(value, Mapping) and len(value) == 1:  # report a.b.c=1 in full, but a whole section once
        part, value = next(iter(value.items()))
        written, name = f"{written}.{part}", f"{name}.{part}"
    shown = NO_VALUE if isinstance(value, Mapping) else value
    guess = suggestion(cls, written)
    message = f"no such key. Did you mean {guess}?" if guess else explain_unknown_key(name, cls)
    return Problem(written, shown, message, literal=True)


def _unsupported(entry: Unsupported, value: Any, written: str, name: str) -> Iterator[tuple[str, Problem | None]]:
    if isinstance(value, Mapping) and entry.switches:
        for switch in entry.switches:
            if switch in value:
                yield from _unsupported(entry, value[switch], f"{written}.{switch}", f"{name}.{switch}")
    else:
        yield name, Problem(written, value, entry.message) if entry.is_requested_by(value) else None


def _normalize_value(cls: type, name: str, value: Any, layer: Layer) -> Any:
    others = tables_of(cls).value_aliases.get(name, {})
    if isinstance(value, str) and value in others:
        layer.notices.append(f"{name}={value} is read as {others[value]}")
        return others[value]
    if name.endswith(".override_config") and isinstance(value, Mapping):
        return _flat_override_config(value)
    return value


def _flat_override_config(value: Mapping[str, Any]) -> dict[str, Any]:
    """`override_config` of a model as verl's Megatron files write it: without `model_config` around its entries, and without a
    `moe_config` that changes nothing."""
    entries = dict(value)
    if isinstance(inner := entries.get("model_config"), Mapping):
        entries = {**entries, **inner}
        del entries["model_config"]
    if isinstance(moe := entries.get("moe_config"), Mapping) and not any(moe.values()):
        del entries["moe_config"]
    return entries
