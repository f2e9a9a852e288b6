"""Command line of the training programs: parse `sys.argv` into a configuration, or exit with a message."""

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from lockstep.config.compose import load_config, to_yaml
from lockstep.config.environment import RootConfig
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.config.short_names import SHORT_NAMES

C = TypeVar("C", bound=RootConfig)

EPILOG = """\
Overrides follow Hydra's grammar:
  trainer.total_epochs=3               set a key
  data.train_files=[a.jsonl,b.jsonl]   a list
  ~trainer.total_epochs                reset a key to its default
  algorithm=grpo                       a preset: ppo, grpo (lockstep ppo)

Short names of the usual settings: {short}.

docs/config.md lists every key with its type, default and meaning.
"""


def config_from_command_line(
    argv: Sequence[str] | None = None,
    cls: type[C] = PPOConfig,  # type: ignore[assignment]
    prog: str = "lockstep ppo",
    description: str = "Train a language model by reinforcement learning.",
) -> C | None:
    """The configuration that `argv` describes (`sys.argv[1:]` for None).

    Returns None after printing the help or the composed configuration. An invalid configuration exits with code 2 and lists
    every problem on stderr.
    """
    parser = _parser(prog, description, SHORT_NAMES.get(cls, ()))
    options = parser.parse_intermixed_args(sys.argv[1:] if argv is None else list(argv))
    if options.help:
        parser.print_help()
        return None
    try:
        config = load_config(
            cls,
            options.overrides,
            config_name=options.config_name,
            config_dir=options.config_path or options.config_dir,
            run_checks=options.cfg is None,
        )
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    if options.cfg is not None:
        sys.stdout.write(to_yaml(config))
        return None
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "; settings are key=value, without dashes" if "arguments: --" in message and "=" in message else ""
        super().error(message + hint)


def _parser(prog: str, description: str, short_names: Collection[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [options] key=value ...",
        description=description,
        epilog=EPILOG.format(short=", ".join(short_names)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings; override those of the file")
    parser.add_argument("-h", "--help", action="store_true", help="show this message and exit")
    parser.add_argument("-c", "--cfg", choices=("job",), help="print the composed configuration as YAML and exit")
    parser.add_argument("-cn", "--config-name", metavar="NAME", help="YAML file to start from, or a path to one")
    parser.add_argument("-cp", "--config-path", metavar="DIR", type=Path, help="folder of that file")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", type=Path, help="the same as --config-path")
    return parser
