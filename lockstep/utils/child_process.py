"""Python child processes of this one: start, end, and how they ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def start_module(
    module: str, *arguments: object, variables: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.Popen[bytes]":
    """Run `python -m module arguments` with the import paths of this process; Ctrl-C in the terminal does not reach it.

    variables: further environment variables.
    options:   of `subprocess.Popen`.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths} | dict(variables or {}),
        start_new_session=True,
        **options,
    )


def wait_or_kill(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def how_it_ended(code: int) -> str:
    """For messages. code: -N if signal N ended the process."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
