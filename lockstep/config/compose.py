"""Compose files and overrides into one checked configuration: `load_config`.

    presets and the user's YAML (Hydra) ──► overrides, in order ──► derived defaults ──► types ──► checks ──► dataclass

Each layer is normalized to canonical spelling first, so that a later layer wins regardless of its spelling.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.batch_sizes import BATCH, MINI, ONE_UPDATE, unset_sizes
from lockstep.config.derived_defaults import derived_defaults
from lockstep.config.environment import RootConfig
from lockstep.config.errors import NO_VALUE, ConfigError, Problem, show
from lockstep.config.evaluation import EvaluationConfig
from lockstep.config.generation import GenerationConfig
from lockstep.config.generation_checks import check_evaluation, check_generation
from lockstep.config.normalize import (
    Layer,
    canonical_name,
    contradiction,
    is_same,
    merge,
    normalize,
    unsupported_values,
)
from lockstep.config.ppo import PPOConfig
from lockstep.config.ppo_checks import check
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.schema import as_written, build, explain_unknown_key, is_mapping_key, keys, sections, set_in
from lockstep.config.sft import SFTConfig
from lockstep.config.sft_checks import check_supervised
from lockstep.config.short_names import SHORT_NAMES, short_setting
from lockstep.registry import load_module
from lockstep.utils.model_path import newest_of_run

logger = logging.getLogger(__name__)
C = TypeVar("C", bound=RootConfig)

PRESETS = Path(__file__).parent / "presets"
DEFAULT_NAMES: dict[type, str] = {
    PPOConfig: "ppo_trainer",
    SFTConfig: "sft_trainer",
    RMConfig: "rm_trainer",
    DPOConfig: "dpo_trainer",
    GenerationConfig: "generation",
    EvaluationConfig: "evaluation",
}
"""Root config class to its preset."""
CHECKS: dict[type, Callable[[Any], tuple[list[Problem], list[str]]]] = {
    PPOConfig: check,
    SFTConfig: check_supervised,
    RMConfig: check_supervised,
    DPOConfig: check_supervised,
    GenerationConfig: check_generation,
    EvaluationConfig: check_evaluation,
}
"""Root config class to the checks of a whole configuration: problems and warnings."""
MAX_NO_EFFECT_NOTICES = 8
"""More settings without effect than this are listed in one line."""
MODEL_KEYS = ("model.path", "lora_adapter_path", "tokenizer_path", "input_tokenizer", "data.tokenizer")
"""Endings of the keys that name a model, an adapter or a tokenizer."""
_HOME = re.compile(r"(?<=[=\[,])~/")
"""`~/` at the start of a value, which Hydra's grammar does not accept."""


@dataclass
class _Settings:
    """The layers so far, merged; see `Layer`. defaults: of keys that no layer sets, instead of the dataclasses'."""

    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, Problem | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    no_effect: dict[str, str] = field(default_factory=dict)
    short: dict[str, str] = field(default_factory=dict)

    def add(self, layer: Layer, cls: type) -> None:
        for name, value in layer.values.items():
            old = self.values.get(name)
            both_mappings = isinstance(old, Mapping) and isinstance(value, Mapping)
            self.values[name] = merge(old, value) if is_mapping_key(keys(cls)[name]) and both_mappings else value
        self.unsupported.update(layer.unsupported)
        self.problems += layer.problems
        self.notices += [notice for notice in layer.notices if notice not in self.notices]
        self.no_effect |= layer.no_effect
        self.short |= layer.short

    def remove(self, name: str) -> bool:
        """Reset `name` and everything below it to the defaults; returns whether anything was set."""
        below = [key for key in self.values if key == name or key.startswith(f"{name}.")]
        unsupported = [key for key in self.unsupported if key == name or key.startswith(f"{name}.")]
        for key in below:
            del self.values[key]
        for key in unsupported:
            del self.unsupported[key]
        self.short = {short: key for short, key in self.short.items() if key not in below}
        return bool(below or unsupported)


def load_config(
    cls: type[C] = PPOConfig,  # type: ignore[assignment]
    overrides: Sequence[str] = (),
    config_name: str | None = None,
    config_dir: str | Path | None = None,
    run_checks: bool = True,
    layers: Sequence[Mapping[str, Any]] = (),
    defaults: Mapping[str, Any] | None = None,
) -> C:
    """The configuration of a file and overrides; ConfigError with every problem if it is invalid.

    overrides:   Hydra's grammar: `key=value`, `+key=value`, `++key=value`, `~key` (reset to the default), `group=preset`.
    config_name: YAML file in `config_dir` (or a preset), with or without `.yaml`; a path to a file works too.
    config_dir:  folder of the user's YAML files and config groups.
    run_checks:  false checks only names and types, not `ppo_checks`.
    layers:      values by key, nested or dotted, that override everything else and the layers before; for callers in Python.
    defaults:    values by dotted key, instead of the dataclasses' defaults; such keys count as not set.
    """
    name, folder = _locate(config_name or DEFAULT_NAMES.get(cls, DEFAULT_NAMES[PPOConfig]), config_dir)
    merged = _Settings(defaults=dict(defaults or {}))
    parsed, merged.problems = _parse(overrides)
    presets, values = _split(parsed, cls, folder, merged)
    composed = _compose_files(name, folder, presets)
    if folder is not None and presets:
        merged.notices += _overridden(_composed(name, folder, []), composed, f"{name}.yaml", ", ".join(presets))
    merged.add(normalize(cls, composed, short_names=True), cls)
    for override in values:
        _apply(override, merged, cls, short_names=True)
    merged.problems += _short_contradictions(values, cls)
    for layer in layers:
        merged.add(normalize(cls, layer, short_names=True), cls)
    return _checked(merged, cls, run_checks)


def config_from_tree(cls: type[C], tree: Mapping[str, Any], run_checks: bool = True) -> C:
    """The configuration of nested settings that were composed elsewhere; ConfigError with every problem if it is invalid."""
    merged = _Settings()
    merged.add(normalize(cls, tree), cls)
    return _checked(merged, cls, run_checks)


def _checked(merged: _Settings, cls: type[C], run_checks: bool) -> C:
    """The settings with derived defaults, types and checks; logs the notices."""
    _load_external_lib(merged, cls)
    _fix_checkpoints(merged)
    unset = unset_sizes(merged.values)
    merged.values = merged.defaults | merged.values
    derived, notices = derived_defaults(cls, merged.values, merged.short)
    merged.values |= derived
    merged.notices += notices
    unsupported = unsupported_values(cls, merged.values)
    for problem in unsupported:
        merged.values.pop(problem.key, None)
    tree: dict[str, Any] = {}
    for key, value in merged.values.items():
        set_in(tree, key, _expand_home(value))
    config, mistyped = build(cls, tree)
    config = replace(config, unset_sizes=unset)
    requested = [problem for problem in merged.unsupported.values() if problem is not None]
    problems = [*merged.problems, *requested, *unsupported, *mistyped]
    warnings: list[str] = []
    if run_checks and cls in CHECKS:
        reported = {canonical_name(cls, problem.key) for problem in problems}
        failed, warnings = CHECKS[cls](config)
        problems += [problem for problem in failed if reported.isdisjoint({problem.key, *problem.also})]
    for notice in [*merged.notices, *_no_effect_notices(merged.no_effect), *warnings]:
        log_once(notice)
    if merged.values.get(MINI) == ONE_UPDATE[MINI] and any(problem.key == BATCH for problem in problems):
        problems = [problem for problem in problems if problem.key != MINI]
    if problems:
        raise ConfigError([_as_written(problem, config) for problem in problems], merged.short)
    return config


def _as_written(problem: Problem, config: RootConfig) -> Problem:
    """The problem without values of environment variables; its key may be an entry of a setting that is a mapping."""
    for key, (written, _) in config.from_environment.items():
        if problem.key == key or problem.key.startswith(f"{key}."):
            return replace(problem, value=written)
    return problem


def _load_external_lib(settings: _Settings, cls: type) -> None:
    """Import the user's module now: what it registers may be named by other keys."""
    key = "model.external_lib" if "model.external_lib" in keys(cls) else "actor_rollout_ref.model.external_lib"
    name = settings.values.get(key)
    if isinstance(name, str) and not name.startswith("${"):
        try:
            load_module(name)
        except ValueError as error:
            settings.problems.append(Problem(key, name, str(error)))


def _fix_checkpoints(settings: _Settings) -> None:
    """Replace a run's folder in a model path by its newest checkpoint now: all workers read the same one, and the saved config
    names it."""
    for key, path in settings.values.items():
        if not isinstance(path, str) or not path or not key.endswith(MODEL_KEYS):
            continue
        try:
            newest = newest_of_run(path)
        except ValueError:
            continue  # reported by the checks
        if newest is not None:
            settings.values[key] = str(newest)
            settings.notices.append(f"{key}={path} is read as {newest}, its newest checkpoint")


@cache
def log_once(notice: str) -> None:
    """Log a notice once per process."""
    logger.warning(notice)


def _no_effect_notices(no_effect: Mapping[str, str]) -> list[str]:
    """One notice per setting with its reason, or a single line if there are many."""
    if len(no_effect) <= MAX_NO_EFFECT_NOTICES:
        return [f"{name} has no effect: {reason}" for name, reason in no_effect.items()]
    return [f"{len(no_effect)} settings have no effect (see docs/config.md): {', '.join(sorted(no_effect))}"]


def to_yaml(config: Any) -> str:
    """A config instance as YAML; `load_config` reads it back to the same values."""
    return yaml.safe_dump(as_written(config), sort_keys=False, allow_unicode=True)


def _locate(name: str, config_dir: str | Path | None) -> tuple[str, Path | None]:
    """The config's name and the user's folder; `name` may be a path."""
    folder = Path(config_dir).expanduser() if config_dir is not None else None
    if folder == Path("config") and not folder.is_dir():
        log_once(
            "--config-path=config: there is no such folder here, so the built-in files are used, as verl uses its own"
        )
        folder, name = None, name.removesuffix(".yaml")
    is_preset = (PRESETS / name).is_file() and not Path(name).is_file()
    is_file_here = folder is None and Path(name).suffix in (".yaml", ".yml") and not is_preset
    if Path(name).parent != Path(".") or is_file_here:
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
        raise ConfigError([Problem("--config-name", name, message)])
    return name, folder.resolve() if folder else None


def _parse(overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    parser = OverridesParser.create()
    parsed, problems = [], []
    for text in overrides:
        try:
            override = parser.parse_override(_HOME.sub(f"{Path.home()}/", text))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            hint = "write key=value without spaces, and quote a value that contains any of = , : [ ] { } ( )"
            if text.endswith((".yaml", ".yml")):
                hint = f"to load a configuration file, use --config-name {text}"
            problems.append(Problem(text, NO_VALUE, f"cannot be parsed ({reason}); {hint}"))
            continue
        if override.is_sweep_override():
            hint = "several values in one override; write a list as [a,b], or run the command once per value"
            problems.append(Problem(text, NO_VALUE, hint))
        else:
            parsed.append(override)
    return parsed, problems


def _split(
    parsed: Sequence[Override], cls: type, folder: Path | None, settings: _Settings
) -> tuple[list[str], list[Override]]:
    """Separate preset choices (`algorithm=grpo`) from value overrides."""
    presets, values = [], []
    for override in parsed:
        name, choice = override.key_or_group, override.value()
        if name == "hydra" or name.startswith("hydra."):
            settings.notices.append(f"{name} has no effect: the output folder is trainer.default_local_dir")
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
        elif short_setting(cls, name, choice) is not None:
            values.append(override)
        else:
            message = f"no such preset. Known: {', '.join(options)}." if options else "is a section; set its keys."
            settings.problems.append(Problem(name, choice, message))
    return presets, values


def _compose_files(name: str, folder: Path | None, presets: Sequence[str]) -> Mapping[str, Any]:
    """The YAML file `name` and the chosen presets, merged by Hydra; interpolations stay as text."""
    if folder is None:  # the package's own files do not change at run time
        return _composed_presets(name, tuple(presets))
    return _composed(name, folder, presets)


def _overridden(
    own: Mapping[str, Any], composed: Mapping[str, Any], file: str, presets: str, section: str = ""
) -> Iterator[str]:
    """A notice for each setting of the user's file that a preset on the command line replaces."""
    for key, value in own.items():
        name, new = f"{section}{key}", composed.get(key)
        if isinstance(value, Mapping) and isinstance(new, Mapping):
            yield from _overridden(value, new, file, presets, f"{name}.")
        elif new != value:
            yield f"{presets} sets {name}={show(new)}, not {show(value)} as {file}; add {name}={show(value)} to keep that"


@cache
def _composed_presets(name: str, presets: tuple[str, ...]) -> Mapping[str, Any]:
    return _composed(name, PRESETS, presets)


def _composed(name: str, folder: Path, presets: Sequence[str]) -> dict[str, Any]:
    search = [f"hydra.searchpath=['file://{PRESETS}']"]
    chosen: list[str] = []
    try:
        with _own_configs_only(), initialize_config_dir(str(folder), job_name="lockstep", version_base=None):
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


@contextmanager
def _own_configs_only() -> Iterator[None]:
    """Hide configs that a program has stored under a name of ours: Hydra would merge them into the preset."""
    stored = ConfigStore.instance().repo
    hidden = {file.name: stored.pop(file.name) for file in PRESETS.glob("*.yaml") if file.name in stored}
    try:
        yield
    finally:
        stored.update(hidden)


def _apply(override: Override, settings: _Settings, cls: type, short_names: bool = False) -> None:
    name = override.key_or_group
    if override.is_delete():
        short = SHORT_NAMES.get(cls, {}) if short_names and name not in sections(cls) else {}
        canonical = short.get(name) or canonical_name(cls, name)
        if not settings.remove(canonical) and canonical not in keys(cls) and canonical not in sections(cls):
            settings.problems.append(Problem(f"~{name}", NO_VALUE, explain_unknown_key(canonical, cls)))
    else:
        settings.add(normalize(cls, {name: _value(override)}, short_names), cls)


def _short_contradictions(overrides: Sequence[Override], cls: type) -> Iterator[Problem]:
    """Overrides that give a key another value than its short name does; of two equal spellings, the last one wins."""
    given: dict[str, tuple[str, Any]] = {}
    for override in overrides:
        if override.is_delete():
            continue
        layer = normalize(cls, {override.key_or_group: _value(override)}, short_names=True)
        written = next(iter(layer.short), override.key_or_group)
        for key, value in layer.values.items():
            other, before = given.get(key, (written, value))
            is_short = bool({other, written} & set(SHORT_NAMES.get(cls, ())))
            if other != written and is_short and not isinstance(value, Mapping) and not is_same(before, value):
                yield contradiction(written, value, other, before)
            given[key] = (written, value)


def _value(override: Override) -> Any:
    """The value; 0.5_2, which Hydra parses as 0.52, stays a string because it may be two bounds."""
    value = override.value()
    written = (override.input_line or "").partition("=")[2].strip()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return written if is_number and "_" in written else value


def _expand_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def translate(cls: type, tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> _Settings:
    """Settings as verl writes them, in the spelling of `cls`; nothing is checked but names and unsupported values."""
    settings = _Settings()
    settings.add(normalize(cls, tree), cls)
    parsed, settings.problems[len(settings.problems) :] = _parse(overrides)
    for override in parsed:
        _apply(override, settings, cls)
    settings.problems += [problem for problem in settings.unsupported.values() if problem is not None]
    settings.problems += (refused := unsupported_values(cls, settings.values))
    for problem in refused:
        del settings.values[problem.key]
    return settings
