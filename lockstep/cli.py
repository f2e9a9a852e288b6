"""The `lockstep` command: a table of programs, each imported only when it is called."""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lockstep import __version__
from lockstep.config.errors import nearest

REQUIRED = ("torch", "transformers", "tensordict", "hydra-core", "omegaconf", "pyarrow", "math-verify")
EXTRAS = {"wandb": "wandb", "mlflow-skinny": "mlflow", "swanlab": "swanlab"}
"""Optional package -> the extra that installs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program named by the first argument and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
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
    return PROGRAMS[program].main(rest)


def usage() -> str:
    """The help text, from the table of programs."""
    rows = [(f"{name} {program.arguments}".strip(), program.summary) for name, program in PROGRAMS.items()]
    rows += [("", ""), ("--version", "show the version and exit")]
    rows += [("--help", "show this message and exit; see also `lockstep PROGRAM --help`")]
    width = max(len(left) for left, _ in rows)
    lines = [f"  {left:{width}}  {right}".rstrip() for left, right in rows]
    return "\n".join(["usage: lockstep PROGRAM [arguments]", "", *lines, ""])


def _ppo(argv: list[str]) -> int:
    from lockstep.trainer import main_ppo

    return main_ppo.main(argv)


def _sft(argv: list[str]) -> int:
    from lockstep.trainer import fsdp_sft_trainer

    return fsdp_sft_trainer.main(argv)


def _rm(argv: list[str]) -> int:
    from lockstep.trainer import main_rm

    return main_rm.main(argv)


def _dpo(argv: list[str]) -> int:
    from lockstep.trainer import main_dpo

    return main_dpo.main(argv)


def _generate(argv: list[str]) -> int:
    from lockstep.trainer import main_generation

    return main_generation.main(argv)


def _eval(argv: list[str]) -> int:
    from lockstep.trainer import main_eval

    return main_eval.main(argv)


def _plan(argv: list[str]) -> int:
    from lockstep.plan import program

    return program.main(argv)


def _grpo(argv: list[str]) -> int:
    preset = "algorithm=grpo"
    if other := [word for word in argv if word.startswith("algorithm=") and word != preset]:
        sys.stderr.write(f"lockstep grpo: {other[0]} contradicts {preset}; use `lockstep ppo {other[0]}`\n")
        return 2
    from lockstep.trainer import main_ppo

    return main_ppo.main([preset, *argv], prog="lockstep grpo")


def _export(argv: list[str]) -> int:
    from lockstep.export import program

    return program.main(argv)


def _convert(argv: list[str]) -> int:
    from lockstep.convert import program

    return program.main(argv)


def _chat(argv: list[str]) -> int:
    from lockstep import chat

    return chat.main(argv)


def _compare(argv: list[str]) -> int:
    from lockstep.observability import compare

    return _to_pipe(compare.main, argv)


def _plot(argv: list[str]) -> int:
    from lockstep.observability import plot

    return _to_pipe(plot.main, argv)


def _rollouts(argv: list[str]) -> int:
    from lockstep.observability import show_rollouts

    return _to_pipe(show_rollouts.main, argv)


def _timeline(argv: list[str]) -> int:
    from lockstep.observability import timeline

    return _to_pipe(timeline.main, argv)


def _to_pipe(program: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a program that only prints; the reader of its output may end early, as in `| head`."""
    try:
        code = program(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail
        return 0


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


@dataclass(frozen=True)
class Program:
    """main: takes the arguments after the program's name and returns the exit code."""

    main: Callable[[list[str]], int]
    arguments: str
    summary: str


PROGRAMS = {
    "ppo": Program(_ppo, "key=value ...", "train a language model by reinforcement learning"),
    "grpo": Program(_grpo, "key=value ...", "the same as `lockstep ppo algorithm=grpo`"),
    "sft": Program(_sft, "key=value ...", "fine-tune a language model on supervised data"),
    "rm": Program(_rm, "key=value ...", "train a reward model on preference pairs"),
    "dpo": Program(_dpo, "key=value ...", "train a language model on preference pairs (DPO)"),
    "generate": Program(_generate, "key=value ...", "answer the prompts of a file with a model"),
    "eval": Program(_eval, "key=value ...", "score the answers in a file"),
    "plan": Program(
        _plan, "key=value ...", "show the memory and time that a training command needs, without loading a model"
    ),
    "export": Program(_export, "CHECKPOINT", "write a checkpoint as a Hugging Face folder, and check it"),
    "convert": Program(_convert, "PATH", "turn a checkpoint, a config or a command of verl into Lockstep's"),
    "chat": Program(_chat, "RUN", "talk to a checkpoint or any other model"),
    "compare": Program(_compare, "RUN RUN ...", "show settings and results of runs side by side"),
    "plot": Program(_plot, "RUN ...", "draw and compare the curves of runs"),
    "rollouts": Program(_rollouts, "RUN", "show the prompts, responses and scores of a step"),
    "timeline": Program(_timeline, "RUN", "show when each phase and worker ran, as a page for a browser"),
    "demo": Program(_demo, "", "train a small model from scratch on this machine"),
    "doctor": Program(_doctor, "", "show installed packages and hardware"),
}


if __name__ == "__main__":
    raise SystemExit(main())
