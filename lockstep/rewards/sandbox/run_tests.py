"""Judge: runs one program on its tests inside a sandbox; see `prime_code` for what counts as passed.

    stdin: program and inputs --fork per test--> program --result or error--> stdout: one message per test
    stdin: program; then asserts                    ^ `name(*args)` over a socket, value back as plain data

Its source goes to `Sandbox.start_source`, so it uses only the standard library; it imports what a test needs when a test
needs it. The program never runs in the judge's process and shares no file with it. Expected outputs stay outside the
sandbox. Asserts run in the judge, on plain values that the program's process returns: a program can neither patch what
checks it nor return an object with its own `__eq__`. The processes for the asserts are forked before the judge reads them,
so they are not in a program's memory either.

A message is its length in 8 bytes, a kind (`t` printed text, `j` returned value as JSON, `p` passed assert, `e` error) and
its content.
"""

from __future__ import annotations

import _signal as signal
import builtins
import ctypes
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes long to import
    from collections.abc import Callable, Iterator
    from typing import Any

MAX_ERROR_CHARS = 300
MAX_OUTPUT_CHARS = 2**20
MAX_MESSAGE_BYTES = 2**24
PR_SET_DUMPABLE = 4
TYPES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple, set)}
"""Types that can be passed as values."""


def main() -> None:
    task = marshal.loads(receive(0))
    execute(task["prelude"], "prelude")  # imported once, before the forks
    outcomes = run_asserts(task) if task["num_asserts"] else run_inputs(task)
    failed = False
    for number, outcome in enumerate(outcomes):
        send(1, outcome)
        failed = failed or outcome.startswith(b"e")
        if failed and number + 1 >= task["num_always"]:
            break


def receive(source: int, deadline: float | None = None) -> bytes:
    """One message without its length. Reads no byte beyond it."""
    size = int.from_bytes(read_exactly(source, 8, deadline), "big")
    if size > MAX_MESSAGE_BYTES and deadline is not None:
        raise ValueError(f"a result of {size} bytes is too large")
    return read_exactly(source, size, deadline)


def read_exactly(source: int, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline is not None and not select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        chunk = os.read(source, min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def send(target: int, message: bytes) -> None:
    data = memoryview(len(message).to_bytes(8, "big") + message)
    while data:
        data = data[os.write(target, data) :]


def describe(error: BaseException) -> bytes:
    """An error as the last line of a traceback shows it."""
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    return f"e{type(error).__name__}{': ' if text else ''}{text}"[: MAX_ERROR_CHARS + 1].encode(errors="replace")


# A process per test


def run_inputs(task: dict[str, Any]) -> Iterator[bytes]:
    """Messages with the outcomes of the inputs, in order."""
    if task["fn_name"]:
        import json  # noqa: F401 (before the forks)
    for given in task["inputs"]:
        deadline = time.monotonic() + task["test_timeout_s"]
        child, channel = fork_program(task, attempt, given)
        try:
            yield receive(channel, deadline)
        except (OSError, EOFError, ValueError) as error:
            yield channel_error(error, task)
        finally:
            end_program(child, channel)


def fork_program(task: dict[str, Any], target: Callable[..., None], *arguments: Any) -> tuple[int, int]:
    """Run `target(task, channel, *arguments)` in a new process; its id and our end of the channel."""
    import _socket

    pair = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    ours, theirs = (end.detach() for end in pair)
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, theirs)
    os.closerange(theirs + 1, 1024)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    cpu_s = int(task["test_timeout_s"]) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    try:
        target(task, theirs, *arguments)
    finally:
        os._exit(0)


def end_program(child: int, channel: int) -> None:
    os.close(channel)
    for kill in (os.killpg, os.kill):
        try:
            kill(child, signal.SIGKILL)
        except OSError:
            continue
    os.waitpid(child, 0)


def channel_error(error: Exception, task: dict[str, Any]) -> bytes:
    if isinstance(error, TimeoutError):
        return f"etook longer than {task['test_timeout_s']} s".encode()
    return b"eended before it answered" if isinstance(error, (OSError, EOFError)) else describe(error)


# Inputs: text on stdin, or arguments of a function


def attempt(task: dict[str, Any], channel: int, given: Any) -> None:
    """Send the result, or the error in one line."""
    try:
        message = call(task, given) if task["fn_name"] else run(task, given)
    except BaseException as error:  # noqa: BLE001 (the program may raise anything, SystemExit too)
        message = describe(error)
    send(channel, message)


def call(task: dict[str, Any], arguments: list[Any]) -> bytes:
    """Return value of the function, or of the method of `class Solution`."""
    import json

    space = execute_program(task, "solution")
    name = task["fn_name"]
    holder = space["Solution"]() if "class Solution" in task["program"] and "Solution" in space else None
    function = getattr(holder, name) if holder is not None else space[name]
    return b"j" + json.dumps(as_json(function(*arguments)), default=str).encode()


def run(task: dict[str, Any], given: str) -> bytes:
    """Output of the program with `given` on its standard input."""
    with nameless_file() as file:
        file.write(given.encode())
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        os.dup2(file.fileno(), 0)
    printed = nameless_file()
    os.dup2(printed.fileno(), 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    try:
        execute_program(task, "__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    finally:
        sys.stdout.flush()
    os.lseek(printed.fileno(), 0, os.SEEK_SET)
    text = printed.read(4 * MAX_OUTPUT_CHARS).decode(errors="replace")
    return b"t" + text[:MAX_OUTPUT_CHARS].encode()


def nameless_file() -> Any:
    """A new file in the private folder that no path leads to."""
    path = f"{os.getpid()}-{time.monotonic_ns()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return open(descriptor, "rb+")


def execute_program(task: dict[str, Any], name: str) -> dict[str, Any]:
    sys.setrecursionlimit(100_000)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # the module site, which sets them, is not loaded
    return execute(task["program"], name, execute(task["prelude"], name))


def execute(program: str, name: str, space: dict[str, Any] | None = None) -> dict[str, Any]:
    space = {"__name__": name} if space is None else space
    exec(compile(program, f"{name}.py", "exec"), space)
    return space


def as_json(value: Any) -> Any:
    """Convert tuples to lists and keys to strings, recursively, as JSON would."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    return value


# Asserts: the judge calls functions of the program, which runs in another process


class Reference:
    """An object that stays in the program's process, such as an instance of its class."""

    def __init__(self, number: int) -> None:
        self.number = number


class RemoteFunction:
    """A function of the program."""

    def __init__(self, name: str, channel: int, deadline: float) -> None:
        self.name, self.channel, self.deadline = name, channel, deadline

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        import json

        send(self.channel, json.dumps([self.name, encode(arguments, None), encode(named, None)]).encode())
        reply = json.loads(receive(self.channel, self.deadline))
        if "error" in reply:
            kind = getattr(builtins, str(reply.get("kind")), None)
            known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, AssertionError)
            text = str(reply["error"])[:MAX_ERROR_CHARS]
            raise kind(text) if kind and known else RuntimeError(f"{reply.get('kind')}: {text}")
        return decode(reply["value"], None)


def run_asserts(task: dict[str, Any]) -> Iterator[bytes]:
    """Messages with the outcomes of the asserts, in order."""
    import json  # noqa: F401 (before the forks)

    programs = [fork_program(task, serve) for _ in range(task["num_asserts"])]
    tests = marshal.loads(receive(0))
    for (child, channel), test in zip(programs, tests["asserts"]):
        try:
            check(tests, test, channel, time.monotonic() + task["test_timeout_s"])
            yield b"p"
        except (TimeoutError, EOFError, BrokenPipeError, ConnectionResetError) as error:
            yield channel_error(error, task)
        except BaseException as error:  # noqa: BLE001 (tests may raise anything)
            yield describe(error)
        finally:
            end_program(child, channel)


def check(tests: dict[str, Any], test: str, channel: int, deadline: float) -> None:
    space = execute(tests["setup"], "tests", execute(tests["prelude"], "tests"))
    for name in tests["names"] or names_of_program(test, space):
        space[name] = RemoteFunction(name, channel, deadline)
    execute(test, "tests", space)


def names_of_program(test: str, space: dict[str, Any]) -> list[str]:
    """Names that only the program can define; if there are none, the built-in name that the test calls first."""
    import ast

    nodes = list(ast.walk(ast.parse(test)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    stored = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    used = {node.id for node in names} - stored
    unknown = [name for name in used if name not in space and not hasattr(builtins, name)]
    called = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return unknown or called[:1]


def serve(task: dict[str, Any], channel: int) -> None:
    """In the program's process: call what the judge asks for."""
    import json

    objects: list[Any] = []
    space: dict[str, Any] | None = None
    while True:
        name, arguments, named = json.loads(receive(channel))
        try:
            space = space or execute_program(task, "solution")
            result = space[name](*decode(arguments, objects), **decode(named, objects))
            message = json.dumps({"value": encode(result, objects)})
        except BaseException as error:  # noqa: BLE001 (the program may raise anything)
            message = json.dumps({"kind": type(error).__name__, "error": str(error)})
        send(channel, message.encode())


def encode(value: Any, objects: list[Any] | None) -> Any:
    """Plain data as JSON. Other objects stay in `objects`, on the program's side."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, list):
        return [encode(item, objects) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, objects), encode(item, objects)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, objects) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, type) and value in TYPES.values():
        return {"type": value.__name__}
    if isinstance(value, Reference):
        return {"reference": value.number}
    if objects is None:
        raise TypeError(f"a test cannot pass a {type(value).__name__} to the program")
    if hasattr(value, "tolist"):
        return encode(value.tolist(), objects)
    objects.append(value)
    return {"reference": len(objects) - 1}


def decode(value: Any, objects: list[Any] | None) -> Any:
    if isinstance(value, list):
        return [decode(item, objects) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "int":
        return int(content, 16)
    if kind == "dict":
        return {decode(key, objects): decode(item, objects) for key, item in content}
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(content, objects))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "type":
        return TYPES[content]
    return Reference(content) if objects is None else objects[content]


if __name__ == "__main__":
    main()
