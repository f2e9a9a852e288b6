"""Judge process: runs one program on its test inputs, each in a separate process.

Uses only the standard library; started as `python -I code_judge.py` with the task as JSON on stdin:

    judge --unshare--> namespace without network --fork per input--> limits, stdin and stdout as files, the program

It prints one outcome per input, `{"result": ...}` or `{"error": "..."}`. It never gets the expected outputs, so that a
program cannot find them in its own process.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any

PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, os, random, re, string, sys, time
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
sys.setrecursionlimit(100_000)
pow = __builtins__["pow"] if isinstance(__builtins__, dict) else __builtins__.pow
"""
"""Imports that solutions of programming contests rely on."""

MAX_FILE_BYTES = 16 * 2**20
MAX_ERROR_CHARS = 300
MAX_OUTPUT_CHARS = 2**20
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1


def main() -> None:
    task = json.load(sys.stdin)
    die_with_parent()
    if not enter_namespaces():
        reply(run_all(task, own_namespace=False))
        return
    # The first process in a new PID namespace is its init: when it exits, the kernel kills all others there.
    init = os.fork()
    if init == 0:
        die_with_parent()
        reply(run_all(task, own_namespace=True))
        os._exit(0)
    os.waitpid(init, 0)


def reply(outcomes: list[dict[str, Any]]) -> None:
    sys.stdout.write(json.dumps(outcomes))
    sys.stdout.flush()


def enter_namespaces() -> bool:
    """Enter new network and PID namespaces; False if the kernel does not allow it."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform != "linux" or libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC) != 0:
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        pass  # unmapped ids: the program then runs as nobody
    return True


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_all(task: dict[str, Any], own_namespace: bool) -> list[dict[str, Any]]:
    """Outcomes in order; after the first `num_always` inputs, stop at a failure."""
    outcomes: list[dict[str, Any]] = []
    for number, given in enumerate(task["inputs"]):
        if number >= task["num_always"] and any("error" in outcome for outcome in outcomes):
            break
        outcomes.append(run_in_child(task, given, own_namespace))
    return outcomes


def run_in_child(task: dict[str, Any], given: Any, own_namespace: bool) -> dict[str, Any]:
    """Run one input in a forked process, then kill all processes it started."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        limit_resources(task["test_timeout_s"], task["memory_mb"])
        outcome = json.dumps(attempt(task, given), default=str)
        with open(outcome_file(os.getpid()), "w") as file:
            file.write(outcome)
        os._exit(0)
    finished = wait_until(child, time.monotonic() + task["test_timeout_s"])
    kill_all(child, own_namespace)
    if not finished:
        os.waitpid(child, 0)
        return {"error": f"took longer than {task['test_timeout_s']} s"}
    try:
        with open(outcome_file(child)) as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return {"error": "ended before it answered"}


def outcome_file(child: int) -> str:
    return f"outcome-{child}.json"


def attempt(task: dict[str, Any], given: Any) -> dict[str, Any]:
    """The result, or the error in one line."""
    try:
        if task["fn_name"]:
            return {"result": call(task["program"], task["fn_name"], given)}
        return {"result": run(task["program"], given)}
    except BaseException:  # noqa: BLE001 (the program may raise anything, SystemExit too)
        return {"error": traceback.format_exc().strip().rpartition("\n")[2][:MAX_ERROR_CHARS]}


def wait_until(child: int, deadline: float) -> bool:
    pause_s = 0.001
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return True


def kill_all(child: int, own_namespace: bool) -> None:
    """Kill the test's process group, or every other process if we have our own PID namespace."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL) if own_namespace else os.killpg(child, signal.SIGKILL)


def limit_resources(timeout_s: float, memory_mb: int) -> None:
    memory = memory_mb * 2**20
    limits = {
        resource.RLIMIT_CPU: math.ceil(timeout_s) + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 64,
    }
    for name, most in limits.items():
        try:
            resource.setrlimit(name, (most, most))
        except (ValueError, OSError):
            continue  # the hard limit is already lower


def call(program: str, name: str, given: Any) -> Any:
    """Return value of the function, or of the method of `class Solution`."""
    arguments = [read_json(line) for line in given.split("\n")] if isinstance(given, str) else list(given)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    space = namespace("solution")
    exec(compile(program, "solution.py", "exec"), space)
    holder = space["Solution"]() if "class Solution" in program and "Solution" in space else None
    function = getattr(holder, name) if holder is not None else space[name]
    return as_json(function(*arguments))


def run(program: str, given: Any) -> str:
    """Output of the program with `given` on its standard input."""
    with open(f"stdin-{os.getpid()}", "w+") as file:
        file.write(given if isinstance(given, str) else "\n".join(map(str, given)))
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        os.dup2(file.fileno(), 0)
    printed = f"stdout-{os.getpid()}"
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    try:
        exec(compile(program, "solution.py", "exec"), namespace("__main__"))
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    finally:
        sys.stdout.flush()
    with open(printed, errors="replace") as file:
        return file.read(MAX_OUTPUT_CHARS)


def namespace(name: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": name}
    exec(PRELUDE, space)
    return space


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def as_json(value: Any) -> Any:
    """Convert tuples to lists and keys to strings, recursively, as JSON would."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    return value


if __name__ == "__main__":
    main()
