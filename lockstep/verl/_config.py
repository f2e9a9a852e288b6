"""Between verl's `DictConfig` and Lockstep's typed config.

    ppo_trainer (Hydra's ConfigStore) ──► the program's DictConfig ──typed_config──► PPOConfig, checked
                                                                    ◄──view────────  DictConfig with every key

A program may have keys that Lockstep does not know; they stay in the DictConfig.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lockstep.config.compat import ALIASES, NO_EFFECT, UNSUPPORTED_KEYS
from lockstep.config.compose import config_from_tree, log_once
from lockstep.config.environment import noted_variables
from lockstep.config.errors import ConfigError
from lockstep.config.normalize import canonical_name, normalize
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import build, defaults, get_in, keys, sections, set_in, to_plain

MISSING = object()
_REFERENCE = re.compile(r"\$\{[^:}]+\}")
"""An interpolation of another key, which may be one of the program's own."""


def default_tree() -> dict[str, Any]:
    """Lockstep's defaults, and null for each key that only verl has, so that Hydra accepts overrides of it."""
    tree = defaults(PPOConfig)
    for name, target in ALIASES.items():
        if target not in sections(PPOConfig):
            set_in(tree, name, None)
    for name in NO_EFFECT:
        set_in(tree, name, None)
    for name, entry in UNSUPPORTED_KEYS.items():
        set_in(tree, name, dict.fromkeys(entry.switches) if entry.switches else None)
    return tree


def register_ppo_trainer() -> None:
    """Make `config_name="ppo_trainer"` and `defaults: [ppo_trainer]` work in the program's own Hydra config."""
    ConfigStore.instance().store(name="ppo_trainer", node=default_tree(), provider="lockstep.verl")


def typed_config(config: DictConfig | Mapping[str, Any] | PPOConfig, run_checks: bool = True) -> PPOConfig:
    """The checked config of a run; ConfigError with every problem if it is invalid. Keys of the program itself are left out.

    run_checks: false checks only names and types, for a program that reads one section of a partial config.
    """
    if isinstance(config, PPOConfig):
        return config
    given = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    resolved = _container(given, resolve=True)
    default = default_tree()
    tree: dict[str, Any] = {}
    written: dict[str, Any] = {}
    for name, value in _leaves(_container(given, resolve=False)):
        if value != get_in(default, name, MISSING):  # what equals the default was not set by the user
            from_environment = _reads_environment(given, name, value)
            keeps_text = from_environment and not _REFERENCE.search(str(value))
            set_in(tree, name, value if keeps_text else get_in(resolved, name, None))
            if from_environment and not keeps_text:
                written[canonical_name(PPOConfig, name)] = value
    own = sorted(
        problem.key
        for problem in normalize(PPOConfig, tree).problems
        if canonical_name(PPOConfig, problem.key) not in keys(PPOConfig)
    )
    if own:
        log_once(f"read by your program only: {', '.join(own)}")
    for name in own:
        _remove(tree, name)
    typed = config_from_tree(PPOConfig, tree, run_checks)
    plain = to_plain(typed)
    found = {
        name: (text, value) for name, text in written.items() if (value := get_in(plain, name, MISSING)) is not MISSING
    }
    return replace(typed, from_environment=typed.from_environment | found)


def _reads_environment(config: DictConfig, name: str, value: Any) -> bool:
    if "${" not in str(value):
        return False
    with noted_variables() as variables:
        OmegaConf.to_container(OmegaConf.create([OmegaConf.select(config, name)]), resolve=True)
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


def _leaves(tree: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for part, value in tree.items():
        name = f"{section}.{part}" if section else str(part)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, name)
        else:
            yield name, value


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
    for field in fields(section):
        if not field.metadata.get("internal") and not is_dataclass(getattr(section, field.name)):
            object.__setattr__(section, field.name, getattr(resolved, field.name))
