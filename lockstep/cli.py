"""The `lockstep` command. Each program is imported only when it is called.

lockstep ppo key=value ...     train; same as `python -m lockstep.trainer.main_ppo`
lockstep plan key=value ...    show what that needs: batch units, memory by phase, time per step
lockstep demo [options]        train a small model from scratch on this machine
lockstep doctor                show installed packages and hardware
"""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from lockstep import __version__
from lockstep.config.errors import nearest

USAGE = """\
usage: lockstep PROGRAM [arguments]

  ppo key=value ...   train a language model by reinforcement learning
  plan key=value ...  show the memory and time that a training command needs, without loading a model
  demo                train a small model from scratch on this machine
  doctor              show installed packages and hardware

  --version           show the version and exit
  --help              show this message and exit; see also `lockstep PROGRAM --help`
"""

REQUIRED = ("torch", "transformers", "tensordict", "hydra-core", "omegaconf", "pyarrow", "math-verify")
EXTRAS = {"wandb": "wandb", "mlflow-skinny": "mlflow", "swanlab": "swanlab"}
"""Optional package -> the extra that installs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program named by the first argument and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    program, *rest = arguments
    if program in ("-V", "--version"):
        sys.stdout.write(f"lockstep {__version__}\n")
        return 0
    if program not in PROGRAMS:
        guess = nearest(program, PROGRAMS)
        hint = f"did you mean {guess}?" if guess else f"known: {', '.join(PROGRAMS)}"
        sys.stderr.write(f"lockstep: unknown program {program!r}; {hint}\n")
        return 2
    return PROGRAMS[program](rest)


def _ppo(argv: list[str]) -> int:
    from lockstep.trainer import main_ppo

    return main_ppo.main(argv)


def _plan(argv: list[str]) -> int:
    from lockstep.plan import program

    return program.main(argv)


def _demo(argv: list[str]) -> int:
    from lockstep import demo

    return demo.main(argv)


def _doctor(argv: list[str]) -> int:
    if argv:
        asked_for_help = argv[0] in ("-h", "--help")
        stream = sys.stdout if asked_for_help else sys.stderr
        stream.write("usage: lockstep doctor\n\nShow installed packages and hardware.\n")
        return 0 if asked_for_help else 2
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "found", box=None)
    rows = [*_software(), *_machine()]
    for name, found in rows:
        table.add_row(name, found)
    Console().print(table)
    return 1 if any(found == MISSING for _, found in rows) else 0


MISSING = "missing: reinstall lockstep-rl"


def _software() -> list[tuple[str, str]]:
    rows = [("lockstep", __version__), ("python", platform.python_version())]
    rows += [(name, _installed(name) or MISSING) for name in REQUIRED]
    for name, extra in EXTRAS.items():
        rows.append((name, _installed(name) or f"not installed; pip install 'lockstep-rl\\[{extra}]'"))
    return rows


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _machine() -> list[tuple[str, str]]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rows = [("system", f"{platform.system()} {platform.machine()}"), ("cpu cores", str(os.cpu_count()))]
    rows.append(("memory", f"{memory:.1f} GiB"))
    if _installed("torch") is None:
        return rows
    import torch

    rows.append(("torch threads", str(torch.get_num_threads())))
    if not torch.cuda.is_available():
        return [*rows, ("device", "cpu (no CUDA device)")]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{device.name}, {device.total_memory / 2**30:.1f} GiB"))
    return rows


PROGRAMS: dict[str, Callable[[list[str]], int]] = {"ppo": _ppo, "plan": _plan, "demo": _demo, "doctor": _doctor}


if __name__ == "__main__":
    raise SystemExit(main())
