"""The dataclasses as a schema: their keys, defaults and types, and how plain data becomes an instance.

    plain data ──► merged over the defaults ──► interpolations resolved ──► values converted to their types ──► instance

Problems are collected instead of raised one by one, so that users can fix all of them at once.
"""

import copy
import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import KeyValidationError, OmegaConfBaseException, UnsupportedValueType

from lockstep.config.bounds import Bound
from lockstep.config.environment import RootConfig, noted_variables
from lockstep.config.errors import ConfigError, Problem, nearest, show

C = TypeVar("C")
MISSING = "???"
"""Marks a value in a YAML file that must be set on the command line."""

REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")
"""What makes a value follow another key."""
MAX_REFERENCES = 16
"""More in a row are left to OmegaConf, which finds circles."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One settable key: its dotted name, its section, its type and bound, and the class and field that define it."""

    name: str
    section: str
    annotation: Any
    bound: Bound | None
    owner: type
    field: str


@cache
def keys(cls: type) -> dict[str, Key]:
    """Every key of `cls` that a user can set, by dotted name."""
    return {key.name: key for key in _walk(cls, "") if not _is_section(key.annotation)}


@cache
def _annotations(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def sections(cls: type) -> dict[str, type]:
    """Every section of `cls`, by dotted name."""
    return {key.name: key.annotation for key in _walk(cls, "") if _is_section(key.annotation)}


def _walk(cls: type, section: str) -> Iterator[Key]:
    types_of = _annotations(cls)
    annotations = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        if field.metadata.get("internal"):
            continue
        name = f"{section}.{field.name}" if section else field.name
        annotation = types_of[field.name]
        yield Key(name, section, annotation, bound_of(annotations[field.name]), cls, field.name)
        if _is_section(annotation):
            yield from _walk(annotation, name)


def bound_of(annotation: Any) -> Bound | None:
    """The bound in `Annotated[type, bound]`, which may be a choice of a union."""
    if isinstance(annotation, Bound):
        return annotation
    return next((bound for part in get_args(annotation) if (bound := bound_of(part))), None)


def _is_section(annotation: Any) -> bool:
    return dataclasses.is_dataclass(annotation)


def is_mapping_key(key: Key) -> bool:
    """Whether the key holds a mapping with arbitrary names."""
    return get_origin(key.annotation) is dict


def to_plain(config: Any) -> dict[str, Any]:
    """A config instance as nested dicts, without the internal fields."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if not field.metadata.get("internal"):
            value = getattr(config, field.name)
            plain[field.name] = to_plain(value) if dataclasses.is_dataclass(value) else _plain_value(value)
    return plain


def as_written(config: Any) -> dict[str, Any]:
    """`to_plain` for files, trackers and the screen: a setting that reads environment variables is as the user wrote it."""
    plain = to_plain(config)
    for name, (written, value) in config.from_environment.items():
        if get_in(plain, name, None) == _plain_value(value):  # else it was replaced after the config was composed
            set_in(plain, name, _plain_value(written))
    return plain


def flat_values(config: Any) -> dict[str, Any]:
    """Dotted key to value."""
    root: type = type(config)
    tree = to_plain(config)
    return {name: get_in(tree, name, None) for name in keys(root)}


def out_of_bounds(cls: type, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Values of `cls`, by dotted key, that their field does not allow."""
    for name, key in keys(cls).items():
        value = values[name]
        if key.bound is not None and value is not None and not key.bound.allows(value):
            yield Problem(name, value, key.bound.message)


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_value(item) for key, item in value.items()}
    return [_plain_value(item) for item in value] if isinstance(value, list | tuple) else value


def defaults(cls: type) -> dict[str, Any]:
    """The defaults of `cls` as nested dicts; a value that follows another key is an interpolation `${...}`."""
    return to_plain(cls())


def explain_unknown_key(name: str, cls: type) -> str:
    """The message for an unknown key, with the most similar known key."""
    if name in sections(cls):
        return "is a section; set its keys."
    known = [*keys(cls), *sections(cls)]
    section, _, leaf = name.rpartition(".")
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    near_sibling = nearest(leaf, [key.rpartition(".")[2] for key in siblings])
    guess = f"{section}.{near_sibling}".lstrip(".") if near_sibling else None
    elsewhere = [key for key in known if not name.startswith(f"{key}.")]
    guess = guess or nearest(name, same_leaf, cutoff=0.0) or nearest(name, elsewhere, cutoff=0.7)
    return f"no such key. Did you mean {guess}?" if guess else "no such key; see docs/config.md."


def to_dataclass(cls: type[C], data: Mapping[str, Any]) -> C:
    """An instance from `data` (nested, any subset of the keys) over the defaults; ConfigError with every problem."""
    unknown = [Problem(name, value, explain_unknown_key(name, cls)) for name, value in unknown_keys(cls, data)]
    config, problems = build(cls, data)
    if unknown or problems:
        raise ConfigError([*unknown, *problems])
    return config


def unknown_keys(cls: type, data: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of nested `data` that `cls` does not have, with their values."""
    for field, value in data.items():
        name = f"{section}.{field}" if section else str(field)
        if name in sections(cls) and (value is None or isinstance(value, Mapping)):
            yield from unknown_keys(cls, value or {}, name)
        elif name not in keys(cls):
            yield name, value


def build(cls: type[C], data: Mapping[str, Any]) -> tuple[C, list[Problem]]:
    """An instance from nested `data`, and its problems; a value with a problem keeps its default.

    Keys that `cls` does not have are ignored.
    """
    known: dict[str, Key] = keys(typing.cast(Any, cls))
    given = {name: value for name in known if (value := get_in(data, name, MISSING)) != MISSING}
    unset = [name for name in known if get_in(data, name, None) == MISSING]
    values, written, problems = _typed_values(cls, given)
    if problems:
        bad = {problem.key for problem in problems}
        values, written, _ = _typed_values(cls, {name: value for name, value in given.items() if name not in bad})
    problems += [Problem(name, MISSING, "must be set on the command line") for name in unset]
    config = _instantiate(cls, values, "")
    if isinstance(config, RootConfig) and written:
        found = {name: (text, values[name]) for name, text in written.items() if name in values}
        config = dataclasses.replace(config, from_environment=found)
    return config, problems


def _typed_values(cls: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Problem]]:
    """The values by key, the text of those that read environment variables, and the problems."""
    tree = defaults(cls)
    own: list[Problem] = []
    inherited: list[Problem] = []
    for name, value in given.items():
        try:
            value = _plain_data(value)
        except OmegaConfBaseException as error:
            own.append(Problem(name, value, _reason(error)))
            continue
        default = get_in(tree, name, None)
        if is_mapping_key(keys(cls)[name]) and isinstance(value, Mapping) and isinstance(default, Mapping):
            value = {**default, **value}
        set_in(tree, name, value)
    interpolated: Any = None  # the tree in OmegaConf, which is slow: few values need it
    values: dict[str, Any] = {}
    written: dict[str, Any] = {}
    for key in keys(cls).values():
        found = own if key.name in given else inherited
        value = text = get_in(tree, key.name, None)
        try:
            value = _followed(value, tree)
            if "${" in str(value):
                interpolated = OmegaConf.create(tree) if interpolated is None else interpolated
                with noted_variables() as variables:
                    value = OmegaConf.select(interpolated, key.name)
                    value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
                if variables:
                    written[key.name] = text
            values[key.name] = coerce(value, key.annotation)
        except OmegaConfBaseException as error:
            found.append(Problem(key.name, text, _reason(error)))
        except Mismatch as error:
            found.append(Problem(key.name, written.get(key.name, value), f"must be {error}"))
    # A key that follows an invalid one is invalid for the same reason: report the one that was set.
    return values, written, own or inherited


def _plain_data(value: Any) -> Any:
    """`value` in dicts, lists and scalars; an error of OmegaConf if it is something else, or a text that cannot be parsed."""
    if value is None or (isinstance(value, bool | int | float | str) and "${" not in str(value)):
        return value
    plain: Any = OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=False)
    return plain["value"]


def _reason(error: OmegaConfBaseException) -> str:
    reason = str(error).splitlines()[0]
    return reason if isinstance(error, UnsupportedValueType | KeyValidationError) else f"interpolation failed: {reason}"


def _followed(value: Any, tree: Mapping[str, Any]) -> Any:
    """`value` with `${key}` replaced by that key's value; unchanged if that takes OmegaConf: resolvers, nested ones, errors."""
    try:
        return _resolved(value, tree, MAX_REFERENCES) if isinstance(value, str) and "${" in value else value
    except _TakesOmegaConf:
        return value


class _TakesOmegaConf(Exception):
    """A text that is more than references to plain values."""


def _resolved(value: Any, tree: Mapping[str, Any], depth: int) -> Any:
    """`value` without references, of which at most `depth` in a row are followed."""
    if "${" not in str(value) and value != MISSING:
        return copy.deepcopy(value)
    is_simple = (
        isinstance(value, str) and value != MISSING and "\\" not in value and "${" not in REFERENCE.sub("", value)
    )
    if not is_simple or not depth:
        raise _TakesOmegaConf

    def target(match: re.Match[str]) -> Any:
        return _resolved(get_in(tree, match[1], MISSING), tree, depth - 1)

    def as_text(match: re.Match[str]) -> str:
        found = target(match)
        if isinstance(found, Mapping | list):
            raise _TakesOmegaConf
        return str(found)

    whole = REFERENCE.fullmatch(value)
    return target(whole) if whole else REFERENCE.sub(as_text, value)


def _instantiate(cls: type[C], values: Mapping[str, Any], section: str) -> C:
    arguments: dict[str, Any] = {}
    for field, annotation in _annotations(typing.cast(Any, cls)).items():
        name = f"{section}.{field}" if section else field
        if _is_section(annotation):
            arguments[field] = _instantiate(annotation, values, name)
        elif name in values:
            arguments[field] = values[name]
    return cls(**arguments)


class Mismatch(ValueError):
    """A value of the wrong type; the text says what is allowed."""


def coerce(value: Any, annotation: Any) -> Any:
    """`value` converted to `annotation` without loss ("1e-6" to a float, "x" to a list of one); Mismatch otherwise."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin in (Union, types.UnionType):
        return _coerce_union(value, annotation)
    if origin is Literal:
        if value in arguments:
            return value
        guess = nearest(str(value), [str(choice) for choice in arguments])
        raise Mismatch(describe(annotation) + (f"; did you mean {guess}?" if guess else ""))
    if origin is dict:
        if value is None or isinstance(value, Mapping):
            return dict(value or {})
        raise Mismatch(describe(annotation))
    if origin is list:
        items = [] if value is None else value if isinstance(value, list | tuple) else [value]
        return _coerce_items(items, [arguments[0]] * len(items), annotation)
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(arguments):
            raise Mismatch(describe(annotation))
        return tuple(_coerce_items(value, arguments, annotation))
    return _coerce_scalar(value, annotation)


def _coerce_union(value: Any, annotation: Any) -> Any:
    arguments = get_args(annotation)
    if value is None or (value == "None" and type(None) in arguments):
        if type(None) in arguments:
            return None
        raise Mismatch(describe(annotation))
    for choice in arguments:
        if choice is not type(None):
            try:
                return coerce(value, choice)
            except Mismatch:
                continue
    raise Mismatch(describe(annotation))


def _coerce_items(items: Any, annotations: Any, whole: Any) -> list[Any]:
    try:
        return [coerce(item, annotation) for item, annotation in zip(items, annotations)]
    except Mismatch:
        raise Mismatch(describe(whole)) from None


def _coerce_scalar(value: Any, annotation: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = value.strip() if isinstance(value, str) else None
    try:
        if annotation is bool:
            if isinstance(value, bool):
                return value
            if text is not None and text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif annotation is int:
            if text is not None:
                return int(text)
            if number and int(value) == value:
                return int(value)
        elif annotation is float:
            if number or (text is not None and "_" not in text):  # 0.5_2 is two bounds, not 0.52
                return float(value)
        elif annotation is str and (number or isinstance(value, str)):
            return str(value)
    except (ValueError, OverflowError):
        pass
    raise Mismatch(describe(annotation))


_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
    Any: "any value",
}


def describe(annotation: Any) -> str:
    """The values that a type allows, in words: "an integer or null"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(choice) for choice in arguments)
    if origin is Literal:
        return "one of " + ", ".join(show(choice) for choice in arguments)
    if origin is dict:
        return "a mapping such as {name: value}"
    if origin is list:
        return f"a list, each item {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each item {describe(arguments[0])}"
    return _NAMES[annotation]


def get_in(tree: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value at dotted `name` in nested dicts."""
    node: Any = tree
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def leaves(tree: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in a tree that is not a section with entries."""
    for part, value in tree.items():
        name = f"{section}.{part}" if section else str(part)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, name)
        else:
            yield name, value


def resolved_value(tree: Mapping[str, Any], name: str) -> Any:
    """The value at dotted `name` with its interpolations, None if there is none; ValueError if one cannot be resolved here."""
    value = get_in(tree, name, None)
    if "${" not in str(value):
        return value
    try:
        value = OmegaConf.select(OmegaConf.create(dict(tree)), name)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0]) from error


def set_in(tree: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Set dotted `name` in nested dicts, creating missing sections."""
    *parents, last = name.split(".")
    for part in parents:
        node = tree.get(part)
        if not isinstance(node, dict):
            node = tree[part] = {}
        tree = node
    tree[last] = value


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a config with these dotted keys set; nothing is checked."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest and dataclasses.is_dataclass(getattr(config, name)):
            below.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    own |= {name: with_values(getattr(config, name), inner) for name, inner in below.items()}
    return dataclasses.replace(config, **own)


def as_arguments(values: Mapping[str, Any]) -> list[str]:
    """Keys and values in the grammar of the command line."""
    return [f"{key}={show(value)}" for key, value in values.items()]
