"""From files and overrides to one checked configuration.

    defaults (dataclasses) ◄── presets, the user's YAML (Hydra) ◄── overrides, in order ──► types ──► checks ──► config

Every layer is brought to canonical spelling first (`compat`), so that a later layer wins whatever its spelling.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.canonical import Layer, canonical_layer, canonical_name, merged, refused_values
from lockstep.config.checks import check
from lockstep.config.compat import REFUSED_FILES
from lockstep.config.errors import NO_VALUE, ConfigError, Problem
from lockstep.config.implied import implied_values
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import build, explain_unknown_key, is_mapping_key, keys, sections, set_in, to_plain

logger = logging.getLogger(__name__)
C = TypeVar("C")

PRESETS = Path(__file__).parent / "presets"
DEFAULT_NAME = "ppo_trainer"
IDLE_NAMED_ONE_BY_ONE = 8
_HOME = re.compile(r"(?<=[=\[,])~/")
"""Where a value begins with the home folder, which Hydra's grammar does not know."""


@dataclass
class _Settings:
    """All layers so far: what is set, what was asked for in vain, what is wrong, what the user should know."""

    values: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, Problem | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    idle: dict[str, str] = field(default_factory=dict)

    def add(self, layer: Layer, cls: type) -> None:
        for name, value in layer.values.items():
            old = self.values.get(name)
            both_mappings = isinstance(old, Mapping) and isinstance(value, Mapping)
            merge = is_mapping_key(keys(cls)[name]) and both_mappings
            self.values[name] = merged(old, value) if merge else value
        self.unsupported.update(layer.unsupported)
        self.problems += layer.problems
        self.notices += [notice for notice in layer.notices if notice not in self.notices]
        self.idle |= layer.idle

    def remove(self, name: str) -> bool:
        """Forget what was set at or below `name`, so that the default holds again; whether anything was."""
        below = [key for key in self.values if key == name or key.startswith(f"{name}.")]
        asked = [key for key in self.unsupported if key == name or key.startswith(f"{name}.")]
        for key in below:
            del self.values[key]
        for key in asked:
            del self.unsupported[key]
        return bool(below or asked)


def load_config(
    cls: type[C] = PPOConfig,  # type: ignore[assignment]
    overrides: Sequence[str] = (),
    config_name: str | None = None,
    config_dir: str | Path | None = None,
    run_checks: bool = True,
) -> C:
    """The configuration that a file and overrides describe; ConfigError with every problem if it cannot be run.

    overrides:   Hydra's grammar: `key=value`, `+key=value`, `++key=value`, `~key` (the default again), `group=preset`.
    config_name: YAML file in `config_dir` (or a preset), with or without `.yaml`; a path to a file works too.
    config_dir:  folder with the user's YAML files and groups.
    run_checks:  false skips the checks across keys and of files, and leaves spelling and types.
    """
    name, folder = _locate(config_name, config_dir)
    settings = _Settings()
    parsed, settings.problems = _parse(overrides)
    presets, values = _split(parsed, cls, folder, settings)
    settings.add(canonical_layer(cls, _compose_files(name, folder, presets)), cls)
    for override in values:
        _apply(override, settings, cls)

    implied, notices = implied_values(settings.values)
    settings.values |= implied
    settings.notices += notices
    refused = refused_values(settings.values)
    for problem in refused:
        settings.values.pop(problem.key, None)
    tree: dict[str, Any] = {}
    for key, value in settings.values.items():
        set_in(tree, key, _expand_home(value))
    config, mistyped = build(cls, tree)
    asked = [problem for problem in settings.unsupported.values() if problem is not None]
    problems = [*settings.problems, *asked, *refused, *mistyped]
    warnings: list[str] = []
    if run_checks and isinstance(config, PPOConfig):
        touched = {canonical_name(cls, problem.key) for problem in problems}
        failed, warnings = check(config)
        problems += [problem for problem in failed if touched.isdisjoint({problem.key, *problem.also})]
    for notice in [*settings.notices, *_idle_notices(settings.idle), *warnings]:
        say_once(notice)
    if problems:
        raise ConfigError(problems)
    return config


@cache
def say_once(notice: str) -> None:
    """Log a notice, once in the life of the process."""
    logger.warning(notice)


def _idle_notices(idle: Mapping[str, str]) -> list[str]:
    """What has no effect: each with its reason, or in one line where a whole configuration came over."""
    if len(idle) <= IDLE_NAMED_ONE_BY_ONE:
        return [f"{name} has no effect: {reason}" for name, reason in idle.items()]
    return [f"{len(idle)} settings have no effect here (docs/config.md says why): {', '.join(sorted(idle))}"]


def to_yaml(config: Any) -> str:
    """A config instance as YAML that `load_config` reads back to the same values."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def _locate(config_name: str | None, config_dir: str | Path | None) -> tuple[str, Path | None]:
    """The config's name and the user's folder; the name may be a path to a file."""
    folder = Path(config_dir).expanduser() if config_dir is not None else None
    name = config_name or DEFAULT_NAME
    if Path(name).parent != Path(".") or (folder is None and Path(name).suffix in (".yaml", ".yml")):
        path = (folder / name if folder else Path(name)).expanduser()
        name, folder = path.name, path.parent
    name = name.removesuffix(".yaml").removesuffix(".yml")
    if folder is not None and not folder.is_dir():
        raise ConfigError([Problem("--config-dir", str(folder), "no such folder")])
    places = [place for place in (folder, PRESETS) if place is not None]
    if not any((place / f"{name}.yaml").is_file() for place in places):
        known = sorted({file.stem for place in places for file in place.glob("*.yaml")})
        where = " and ".join(str(place) for place in places)
        message = f"no {name}.yaml in {where}. Known: {', '.join(known)}."
        raise ConfigError([Problem("--config-name", name, REFUSED_FILES.get(name, message))])
    return name, folder.resolve() if folder else None


def _parse(overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    parser = OverridesParser.create()
    parsed, problems = [], []
    for text in overrides:
        try:
            override = parser.parse_override(_HOME.sub(f"{Path.home()}/", text))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            hint = "write key=value, and quote a value that holds any of = , : [ ] { } ( )"
            if text.endswith((".yaml", ".yml")):
                hint = f"a configuration file is given as --config-name {text}"
            problems.append(Problem(text, NO_VALUE, f"cannot be read ({reason}); {hint}"))
            continue
        if override.is_sweep_override():
            hint = "several values in one override; write a list as [a,b] or run the command once for each"
            problems.append(Problem(text, NO_VALUE, hint))
        else:
            parsed.append(override)
    return parsed, problems


def _split(
    parsed: Sequence[Override], cls: type, folder: Path | None, settings: _Settings
) -> tuple[list[str], list[Override]]:
    """Choices of presets (`algorithm=grpo`) and settings of values apart."""
    presets, values = [], []
    for override in parsed:
        name, choice = override.key_or_group, override.value()
        if name == "hydra" or name.startswith("hydra."):
            settings.notices.append(f"{name} has no effect: the run's folder is trainer.default_local_dir")
            continue
        options = sorted(
            {
                file.stem
                for place in (folder, PRESETS)
                if place
                for file in (place / name.replace(".", "/")).glob("*.yaml")
            }
        )
        is_choice = isinstance(choice, str) and not override.is_delete() and (options or name in sections(cls))
        if not is_choice or name in keys(cls):
            values.append(override)
        elif choice in options:
            presets.append(f"{name}={choice}")
        else:
            message = f"no such preset. Known: {', '.join(options)}." if options else "is a section; set its keys."
            settings.problems.append(Problem(name, choice, REFUSED_FILES.get(str(choice), message)))
    return presets, values


def _compose_files(name: str, folder: Path | None, presets: Sequence[str]) -> Mapping[str, Any]:
    """The YAML file `name` and the chosen presets, merged by Hydra; interpolations stay as text."""
    if folder is None:  # the package's own files do not change while it runs
        return _composed_presets(name, tuple(presets))
    return _composed(name, folder, presets)


@cache
def _composed_presets(name: str, presets: tuple[str, ...]) -> Mapping[str, Any]:
    return _composed(name, PRESETS, presets)


def _composed(name: str, folder: Path, presets: Sequence[str]) -> dict[str, Any]:
    search = [f"hydra.searchpath=['file://{PRESETS}']"]
    chosen: list[str] = []
    try:
        with initialize_config_dir(str(folder), job_name="lockstep", version_base=None):
            for preset in presets:
                try:
                    compose(name, [*search, *chosen, preset])
                    chosen.append(preset)
                except HydraException:
                    chosen.append(f"+{preset}")  # not in the file's defaults list: add it
            tree = OmegaConf.to_container(compose(name, [*search, *chosen]), resolve=False)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError([Problem("--config-name", name, str(error))]) from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _apply(override: Override, settings: _Settings, cls: type) -> None:
    name = override.key_or_group
    if override.is_delete():
        canonical = canonical_name(cls, name)
        if not settings.remove(canonical) and canonical not in keys(cls) and canonical not in sections(cls):
            settings.problems.append(Problem(f"~{name}", NO_VALUE, explain_unknown_key(canonical, cls)))
    else:
        settings.add(canonical_layer(cls, {name: _value(override)}), cls)


def _value(override: Override) -> Any:
    """The value as written: Hydra reads 0.5_2 as the number 0.52, and here it may be two bounds."""
    value = override.value()
    written = (override.input_line or "").partition("=")[2].strip()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return written if is_number and "_" in written else value


def _expand_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value
