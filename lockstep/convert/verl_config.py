"""verl's configs and commands in Lockstep's spelling, by the tables of `config/compat.py`.

    CONFIG.yaml ─► YAML with the settings that differ from our defaults, or on which another default depends
    SCRIPT.sh   ─► each `python -m verl.trainer.…` command as a command of Lockstep

Comments in the output list what was renamed, what has no effect and is left out, and what is refused.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.checks import NOT_INSTALLED
from lockstep.config.compose import DEFAULT_NAMES, config_from_tree, translate
from lockstep.config.derived_defaults import IF_SET
from lockstep.config.errors import ConfigError, Problem, show
from lockstep.config.evaluation import EvaluationConfig
from lockstep.config.generation import GenerationConfig
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import defaults, get_in, set_in
from lockstep.config.sft import SFTConfig

_PPO = ("ppo", "lockstep.trainer.main_ppo", PPOConfig)
_SFT = ("sft", "lockstep.trainer.fsdp_sft_trainer", SFTConfig)
PROGRAMS: dict[str, tuple[str, str, type]] = {
    "verl.trainer.main_ppo": _PPO,
    "recipe.dapo.main_dapo": _PPO,
    "recipe.dapo.src.main_dapo": _PPO,
    "verl.trainer.fsdp_sft_trainer": _SFT,
    "verl.trainer.sft_trainer": _SFT,
    "verl.trainer.main_generation": ("generate", "lockstep.trainer.main_generation", GenerationConfig),
    "verl.trainer.main_eval": ("eval", "lockstep.trainer.main_eval", EvaluationConfig),
}
"""verl's module -> our program, its module, and its config class."""

PROGRAM_OF = {cls: program for program, _, cls in PROGRAMS.values()}
VERL_DEFAULTS: dict[type, dict[str, int]] = {
    PPOConfig: {"trainer.n_gpus_per_node": 8},
    GenerationConfig: {"trainer.n_gpus_per_node": 8},
}
"""Settings that a command of verl does not write because they are its default, which decides where the run fits."""

_PATHS = ("path", "_files", "tokenizer", "_dir")
"""Endings of keys that name files."""
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_ARGUMENTS = ("$@", "$*", "${@}", "${*}")
"""The arguments of a script, which it passes on."""
_QUOTED = re.compile(r"[\w./@%+=:,~^-]+")


@dataclass
class Report:
    """What happened to the settings.

    renamed:   spellings that were replaced.
    added:     settings that verl has by default.
    no_effect: key to the reason why it was left out.
    refused:   settings that were left out because their feature is missing or their name is unknown.
    to_fix:    values that were kept, and that the training program will refuse.
    """

    renamed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    no_effect: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    to_fix: list[str] = field(default_factory=list)

    def comments(self) -> Iterator[str]:
        yield from (f"# renamed: {line}" for line in self.renamed)
        yield from (f"# added, because verl's default differs: {line}" for line in self.added)
        for reason in dict.fromkeys(self.no_effect.values()):
            names = [name for name, other in self.no_effect.items() if other == reason]
            yield f"# left out, no effect: {', '.join(names)}: {reason}"
        yield from (f"# left out, refused: {line}" for line in self.refused)
        yield from (f"# to fix: {line}" for line in self.to_fix)


@dataclass(frozen=True)
class Command:
    """A command of a script. launcher: words before the module (torchrun and its options); words: those after it."""

    module: str
    launcher: list[str]
    words: list[str]


def convert_config(path: Path) -> tuple[str, Report]:
    """A YAML file of verl as one of ours, and the report; ValueError if it is not a config."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path} is not a config: it holds a {type(tree).__name__}, not keys with values")
    cls = _config_class(tree)
    settings, report = _translated(
        cls, {name: value for name, value in tree.items() if name not in ("defaults", "hydra")}, []
    )
    default = defaults(cls)
    kept: dict[str, Any] = {}
    if "defaults" in tree:
        kept["defaults"] = [DEFAULT_NAMES[cls], "_self_"]
    for name, value in settings.items():
        matters = name in IF_SET or value != get_in(default, name, None)
        if matters and "oc.select:" not in str(value):
            set_in(kept, name, value)
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True) if kept else ""
    return "\n".join([f"# lockstep {PROGRAM_OF[cls]} --config-name FILE", *report.comments(), text]), report


def _config_class(tree: Mapping[str, Any]) -> type:
    """The program that a config is for, by its sections."""
    if "actor_rollout_ref" in tree or "algorithm" in tree:
        return PPOConfig
    if "rollout" in tree:
        return GenerationConfig
    return SFTConfig if "optim" in tree or "model" in tree else EvaluationConfig


def convert_script(path: Path) -> tuple[str, Report]:
    """The commands of a shell script as ours, and what is refused in all of them; ValueError if it has none of verl's."""
    try:
        commands = list(commands_of(path.read_text(encoding="utf-8")))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file") from error
    known = [command for command in commands if command.module in PROGRAMS]
    if not known:
        others = sorted({command.module for command in commands})
        found = f"only {', '.join(others)}" if others else "no `python -m MODULE`"
        raise ValueError(f"{path} has {found}; these commands are converted: {', '.join(sorted(PROGRAMS))}")
    texts = []
    whole = Report()
    for command in known:
        text, report = convert_command(command)
        texts.append(text)
        whole.refused += report.refused
        whole.to_fix += report.to_fix
    return "\n\n".join(texts) + "\n", whole


def convert_command(command: Command) -> tuple[str, Report]:
    program, module, cls = PROGRAMS[command.module]
    passed_on = [word for word in command.words if word in _ARGUMENTS]
    options, overrides = _split([word for word in command.words if word not in _ARGUMENTS])
    settings, report = _translated(cls, {}, overrides)
    for name, value in VERL_DEFAULTS.get(cls, {}).items():
        if name not in settings and "--config-name" not in " ".join(options):
            settings[name] = value
            report.added.append(f"{name}={show(value)}")
    start = [*command.launcher, "-m", module] if command.launcher else ["lockstep", program]
    words = [_quoted(word) for word in (*start, *options)]
    lines = [" ".join(words), *(f"    {_quoted(f'{name}={_written(value)}')}" for name, value in settings.items())]
    lines += ['    "$@"'] if passed_on else []
    return "\n".join([*report.comments(), " \\\n".join(lines)]), report


def commands_of(script: str) -> Iterator[Command]:
    """The `python -m MODULE` and torchrun commands, with the variables that the script sets."""
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\s*\n", " ", script).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a part of a multi-line string or a heredoc
        words = [_expanded(word, variables) for word in words]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])) and "-m" not in words[:1]:
            variables[match[1]] = match[2]
            words.pop(0)
        if words[:1] == ["export"]:
            variables |= {match[1]: match[2] for word in words[1:] if (match := _ASSIGNMENT.fullmatch(word))}
        elif "-m" in words and words.index("-m") + 1 < len(words):
            at = words.index("-m")
            launcher = words[:at] if any(word.endswith("torchrun") for word in words[:at]) else []
            rest = words[at + 2 :]
            end = next((i for i, word in enumerate(rest) if re.fullmatch(r"[|&;]+|\d?>+.*|<.*", word)), len(rest))
            yield Command(words[at + 1], launcher, rest[:end])


def _translated(cls: type, tree: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], Report]:
    settings = translate(cls, tree, overrides)
    settings.values = {name: value for name, value in settings.values.items() if value != "???"}
    report = Report(
        renamed=settings.notices,
        no_effect=settings.no_effect,
        refused=[str(problem) for problem in settings.problems],
        to_fix=[str(problem) for problem in _problems(cls, settings.values)],
    )
    return settings.values, report


def _problems(cls: type, values: Mapping[str, Any]) -> Sequence[Problem]:
    """What the training program refuses, apart from paths and packages, which are those of another machine; nothing if a value is
    unknown."""
    if any("$" in show(value).replace("${", "") for value in values.values()):
        return ()
    tree: dict[str, Any] = {}
    for name, value in values.items():
        set_in(tree, name, value)
    try:
        config_from_tree(cls, tree)
    except ConfigError as error:
        return [p for p in error.problems if not p.key.endswith(_PATHS) and p.message not in NOT_INSTALLED]
    return ()


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of Hydra, with their values, and overrides."""
    options: list[str] = []
    overrides: list[str] = []
    for word in words:
        takes_value = bool(options) and options[-1] in ("--config-name", "--config-path", "--config-dir", "-cn", "-cp")
        (options if word.startswith("-") or (takes_value and "=" not in word) else overrides).append(word)
    return options, overrides


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """With the script's variables; others stay, as `$NAME`."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        default = match[2]
        if name in variables:
            return variables[name]
        return f"${name}" if default is None else default

    return _VARIABLE.sub(value, word)


def _written(value: Any) -> str:
    """In Hydra's grammar."""
    if isinstance(value, str) and re.search(r"[\s,:\[\]{}()=]", value) and not value.startswith("${"):
        return "'" + value.replace("'", r"\'") + "'"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_written(item)}" for name, item in value.items()) + "}"
    return show(value)


def _quoted(word: str) -> str:
    """For the shell, which expands what the script did not set."""
    if _QUOTED.fullmatch(word):
        return word
    return f'"{word}"' if "$" in word and '"' not in word else shlex.quote(word)
