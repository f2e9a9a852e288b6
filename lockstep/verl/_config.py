"""Between verl's `DictConfig` and Lockstep's typed config.

    ppo_trainer (Hydra's ConfigStore) ──► the program's DictConfig ──typed_config──► PPOConfig, checked
                                                                    ◄──view────────  DictConfig with every key

`sft_trainer` and `SFTConfig` likewise.

A program may have keys that Lockstep does not know; they stay in the DictConfig. What the program or its user sets is kept; of
`ppo_trainer`, the keys that have a derived default (`config/derived_defaults.py`) are interpolations that resolve to it.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, overload

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.compose import DEFAULT_NAMES, config_from_tree, log_once
from lockstep.config.derived_defaults import IF_SET, derived_defaults
from lockstep.config.environment import noted_variables
from lockstep.config.errors import ConfigError
from lockstep.config.normalize import canonical_name, normalize, tables_of
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import SECTIONS
from lockstep.config.schema import build, defaults, get_in, keys, leaves, sections, set_in, to_plain
from lockstep.config.sft import SFTConfig
from lockstep.verl._names import RESOLVER

C = TypeVar("C", PPOConfig, SFTConfig)
MISSING = object()
CONFIGS: dict[str, type] = {DEFAULT_NAMES[cls]: cls for cls in (PPOConfig, SFTConfig)}
"""The configs that are added to Hydra."""
ROLLOUT_N = "actor_rollout_ref.rollout.n"
"""Verl's sections have it too, as `rollout_n`."""
_REFERENCE = re.compile(r"\$\{[^:}]+\}")
"""An interpolation of another key, which may be one of the program's own."""


def default_tree(cls: type = PPOConfig) -> dict[str, Any]:
    """Lockstep's defaults, and null for each key that only verl has, so that Hydra accepts overrides of it.

    Keys of which it matters whether they were set are `${lockstep.default:CONFIG,KEY}`.
    """
    tree, tables = defaults(cls), tables_of(cls)
    for name in IF_SET:
        if name in keys(cls):
            set_in(tree, name, f"${{{RESOLVER}:{DEFAULT_NAMES[cls]},{name}}}")
    for name, target in tables.aliases.items():
        if target not in sections(cls):
            set_in(tree, name, None)
    for name in tables.no_effect:
        set_in(tree, name, f"${{{ROLLOUT_N}}}" if name.endswith(".rollout_n") else None)
    for name, entry in tables.unsupported_keys.items():
        set_in(tree, name, dict.fromkeys(entry.switches) if entry.switches else None)
    return tree


def register_configs() -> None:
    """Make `config_name="ppo_trainer"` and `defaults: [ppo_trainer]` work in the program's own Hydra config, also with
    `config_path="config"`, the folder that verl has beside its programs."""
    for name, cls in CONFIGS.items():
        ConfigStore.instance().store(name=name, node=default_tree(cls), provider="lockstep.verl")
    tree = default_tree()
    for role in SECTIONS.values():
        set_in(tree, role.strategy, "megatron")
    ConfigStore.instance().store(name="ppo_megatron_trainer", node=tree, provider="lockstep.verl")
    Plugins.instance().register(ConfigFolder)


class ConfigFolder(SearchPathPlugin):
    """Lets a program name verl's folder `config` without having it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.provider == "main" and element.path is not None and _is_missing_config_folder(element.path):
                element.path = f"pkg://{__package__}.trainer"


def _is_missing_config_folder(path: str) -> bool:
    scheme, _, place = path.rpartition("://")
    if scheme == "pkg":
        *parents, name = place.split(".")
        parent = find_spec(".".join(parents)) if parents else None
        folders = (
            [Path(folder) / name for folder in (parent.submodule_search_locations or ())] if parent else [Path(name)]
        )
    else:
        folders = [Path(place)]
    return folders[0].name == "config" and not any(folder.is_dir() for folder in folders)


@overload
def typed_config(config: Any, run_checks: bool = True) -> PPOConfig: ...


@overload
def typed_config(config: Any, run_checks: bool = True, *, cls: type[C]) -> C: ...


def typed_config(config: Any, run_checks: bool = True, *, cls: type = PPOConfig) -> Any:
    """The checked config of a run, from a DictConfig or a mapping; ConfigError with every problem if it is invalid. Keys of the
    program itself are left out.

    run_checks: false checks only names and types, for a program that reads one section of a partial config.
    """
    if isinstance(config, cls):
        return config
    given = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    resolved = _container(given, resolve=True)
    tree: dict[str, Any] = {}
    written: dict[str, Any] = {}
    for name, value in _changes(cls, _container(given, resolve=False)):
        if name.endswith(".rollout_n") and get_in(resolved, name, None) == get_in(resolved, ROLLOUT_N, None):
            continue
        from_environment = _reads_environment(given, name, value)
        keeps_text = from_environment and not _REFERENCE.search(str(value))
        set_in(tree, name, value if keeps_text else get_in(resolved, name, None))
        if from_environment and not keeps_text:
            written[canonical_name(cls, name)] = value
    own = sorted(
        problem.key for problem in normalize(cls, tree).problems if canonical_name(cls, problem.key) not in keys(cls)
    )
    if own:
        log_once(f"read by your program only: {', '.join(own)}")
    for name in own:
        _remove(tree, name)
    typed: Any = config_from_tree(cls, tree, run_checks)
    plain = to_plain(typed)
    found = {
        name: (text, value) for name, text in written.items() if (value := get_in(plain, name, MISSING)) is not MISSING
    }
    return replace(typed, from_environment=typed.from_environment | found)


def typed_section(section: Any, name: str, cls: type = PPOConfig) -> Any:
    """The typed section `name` (`actor_rollout_ref`) of the config that `section` is a part of, or from `section` alone."""
    if is_dataclass(section):
        return section
    root = section._get_root() if isinstance(section, DictConfig) else None
    is_part = isinstance(root, DictConfig) and OmegaConf.select(root, name) is section
    typed: Any = typed_config(root if is_part else {name: section}, run_checks=False, cls=cls)
    found = getattr(typed, name)
    if name == "critic":  # whose workers do not get the rollout's section
        num_samples = typed.actor_rollout_ref.rollout.n if is_part else section.get("rollout_n") or 1
        object.__setattr__(found, "rollout_n", num_samples)
    return found


def _changes(cls: type, written: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys and values that differ from `default_tree`."""
    default = _default_tree(cls)
    return ((name, value) for name, value in leaves(written) if value != get_in(default, name, MISSING))


@cache
def _default_tree(cls: type) -> Mapping[str, Any]:
    return default_tree(cls)


class _Derived:
    """The derived defaults of the last config that was asked for one."""

    written: Mapping[str, Any] | None = None
    values: Mapping[str, Any]


def default_of(config: str, name: str, root: DictConfig) -> Any:
    """The value that a run of the config `root` uses for a key that is not set."""
    cls, written = CONFIGS[config], _container(root, resolve=False)
    if written != _Derived.written:
        _Derived.values, _Derived.written = _derived_values(cls, written), written
    return _Derived.values.get(name, get_in(defaults(cls), name, None))


def _derived_values(cls: type, written: Mapping[str, Any]) -> Mapping[str, Any]:
    tree, changes = defaults(cls), dict(_changes(cls, written))
    for name, value in changes.items():
        set_in(tree, name, value)
    complete = OmegaConf.create(tree)
    for name, value in changes.items():
        if "${" in str(value):
            with suppress(OmegaConfBaseException):  # `typed_config` reports it
                changes[name] = OmegaConf.select(complete, name)
    return derived_defaults(cls, normalize(cls, changes).values)[0]


def _reads_environment(config: DictConfig, name: str, value: Any) -> bool:
    if "${" not in str(value):
        return False
    with noted_variables() as variables:
        node = OmegaConf.select(config, name)
        if OmegaConf.is_config(node):
            OmegaConf.to_container(node, resolve=True)
    return bool(variables)


def view(config: DictConfig | Mapping[str, Any] | PPOConfig, typed: PPOConfig) -> DictConfig:
    """`typed` as a DictConfig, with the keys of `config` that only the program reads."""
    plain = to_plain(typed)
    if isinstance(config, PPOConfig):
        return OmegaConf.create(plain)
    given = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    merged = OmegaConf.merge(_container(given, resolve=True), plain)
    assert isinstance(merged, DictConfig)
    return merged


def set_keys(cls: type, config: Any) -> Any:
    """A section without the keys that only verl has and nobody set."""
    if isinstance(config, cls):
        return config
    known = {field.name for field in fields(cls)}
    return {name: value for name, value in config.items() if name in known or not _is_unset(value)}


def _is_unset(value: Any) -> bool:
    return all(map(_is_unset, value.values())) if isinstance(value, Mapping | DictConfig) else value is None


def _container(config: DictConfig, resolve: bool) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _remove(tree: dict[str, Any], name: str) -> None:
    """Remove a dotted key, and sections that are empty then."""
    first, _, rest = name.partition(".")
    if rest:
        _remove(tree[first], rest)
    if not rest or not tree[first]:
        tree.pop(first, None)


def resolve_by_hand(section: Any, path: str) -> None:
    """Complete a section that a program constructed itself: interpolated defaults get their values, every value its type.

    path: the section's place in the config, `actor_rollout_ref.actor`.
    """
    tree: dict[str, Any] = {}
    set_in(tree, path, to_plain(section))
    resolved, problems = build(PPOConfig, tree)
    if problems:
        raise ConfigError(problems)
    for part in path.split("."):
        resolved = getattr(resolved, part)
    _complete(section, resolved)


def _complete(section: Any, resolved: Any) -> None:
    """Set the fields of `section`, and of copies of the sections inside, from `resolved`."""
    for field in fields(section):
        if field.metadata.get("internal"):
            continue
        value = getattr(resolved, field.name)
        if is_dataclass(value):
            inner = copy(getattr(section, field.name))
            _complete(inner, value)
            value = inner
        object.__setattr__(section, field.name, value)
