"""Programs of lockstep without the imports of a new interpreter, which take longer than a tiny run.

Program    in a separate process, forked from one that has imported everything: for tests that send it signals
run_shell  shell commands in bash, the Python programs that they start in this process
run_python, output_of  a Python program in this process
"""

import atexit
import importlib
import io
import logging
import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest

PRELOADED = ["tests.engines.train.cases", "lockstep.trainer.ppo.task_runner", "lockstep.trainer.supervised.runner"]
"""Imported once, by the process from which others are forked."""

LIMIT_S = 120.0


def forking_context() -> multiprocessing.context.ForkServerContext:
    """Starts processes that have imported PRELOADED."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Program:
    """`python -m MODULE ARGUMENTS`, with its output in files of `folder`.

    variables: added to the environment, which is that of the first test that forks a process.
    """

    def __init__(self, module: str, arguments: list[str], folder: Path, **variables: str) -> None:
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"
        args = (module, arguments, self._out, self._err, variables)
        self.process = forking_context().Process(target=_run, args=args)
        self.process.start()

    @property
    def stdout(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def stderr(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def until(self, condition: Callable[[], object]) -> bool:
        """Wait until the condition holds; False if the program ends before."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, self.stdout + self.stderr
            if not self.process.is_alive():
                return False
            time.sleep(0.01)
        return True

    def signal(self, number: int) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def wait(self) -> int:
        """The exit code; negative for a signal."""
        self.process.join(LIMIT_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {LIMIT_S} s: {self.stdout + self.stderr}")
        return self.process.exitcode


def _run(module: str, arguments: list[str], out: Path, err: Path, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)
    try:
        sys.exit(importlib.import_module(module).main(arguments))
    finally:
        atexit._run_exitfuncs()  # processes of multiprocessing do not run them


STAND_IN = """\
#!/bin/sh
printf '%s\\0' "$#" "$@" > "$CALLS"
read -r code < "$CODES"
exit "$code"
"""
"""Passes its arguments to `run_shell` and exits with the code that it answers."""


def run_shell(command: list[str], folder: Path, environment: dict[str, str]) -> int:
    """Run a shell command whose scripts start Python as "$PYTHON", in `folder`; its exit code.

    The programs have the environment of this process, not that of the shell.
    """
    calls, codes, python = (folder / name for name in ("calls", "codes", "python"))
    for pipe in (calls, codes):
        os.mkfifo(pipe)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    own = {"PYTHON": str(python), "CALLS": str(calls), "CODES": str(codes)}
    with open(calls, "r+b", buffering=0) as asked, open(codes, "r+b", buffering=0) as answers:
        process = subprocess.Popen(command, env=os.environ | environment | own)
        try:
            while process.poll() is None:
                if select.select([asked], [], [], 0.02)[0]:
                    words = [_word(asked.fileno()) for _ in range(int(_word(asked.fileno())))]
                    os.write(answers.fileno(), f"{run_python(words)}\n".encode())
        finally:
            process.kill()
    return process.wait()


def _word(pipe: int) -> str:
    """Read up to a zero byte."""
    found = b""
    while (byte := os.read(pipe, 1)) != b"\0":
        found += byte
    return found.decode()


def run_python(arguments: list[str]) -> int:
    """`python ARGUMENTS` in this process: a module, a script or code (-c); its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        try:
            if arguments[0] == "-m":
                patch.setattr(sys, "argv", arguments[1:])
                patch.delitem(sys.modules, arguments[1], raising=False)  # it is run as __main__
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            elif arguments[0] == "-c":
                patch.setattr(sys, "argv", ["-c", *arguments[2:]])
                exec(arguments[1], {"__name__": "__main__"})
            else:
                patch.syspath_prepend(str(Path(arguments[0]).parent))
                runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def output_of(*arguments: str) -> tuple[int, str]:
    """`run_python`, and what the program logs and writes to stderr."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger().addHandler(handler)
    try:
        with redirect_stderr(text):
            return run_python(list(arguments)), text.getvalue()
    finally:
        logging.getLogger().removeHandler(handler)
