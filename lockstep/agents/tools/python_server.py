"""Runs inside the sandbox: executes one piece of code after another in one namespace, and returns the output of each.

Its source goes to `Sandbox.start_source`, so it uses only the standard library. A message is its length in 8 bytes and UTF-8
text, in both directions. The code runs in this process and could forge its own output, which is the policy's output anyway.
"""

import ast
import contextlib
import io
import os
import sys
import traceback

MAX_CHARS = 1 << 16


def main() -> None:
    source, target = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    space: dict[str, object] = {"__name__": "__main__"}
    while True:
        code = receive(source).decode()
        reply = run(code, space)[:MAX_CHARS].encode(errors="replace")
        os.write(target, len(reply).to_bytes(8, "big") + reply)


def receive(source: int) -> bytes:
    return read_exactly(source, int.from_bytes(read_exactly(source, 8), "big"))


def read_exactly(source: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(source, size - len(data))
        if not chunk:
            sys.exit(0)
        data += chunk
    return data


def run(code: str, space: dict[str, object]) -> str:
    """What the code prints, then the value of its last expression or the error."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            tree = ast.parse(code, "code")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "code", "exec"), space)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "code", "eval"), space)
                if value is not None:
                    printed.write(f"{value!r}\n")
        except BaseException as error:  # noqa: BLE001 - the code may raise anything, SystemExit too
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "code"]
            line = f" (line {frames[-1].lineno})" if frames else ""
            printed.write("".join(traceback.format_exception_only(error)).strip() + line)
    return printed.getvalue()


if __name__ == "__main__":
    main()
