"""`lockstep dashboard [RUN or folder of runs]`: serves the page until Ctrl-C."""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from lockstep.observability.dashboard.child import ADDRESS
from lockstep.observability.dashboard.runs import Runs
from lockstep.observability.jsonl import METRICS_FILE
from lockstep.utils.local_http import bind, is_loopback

TOKEN_VARIABLE = "LOCKSTEP_DASHBOARD_TOKEN"
DEFAULT_FOLDER = Path("checkpoints")
PORTS_TRIED = 20
NICENESS = 10


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        return _export(options) if options.export is not None else _serve(options)
    except ValueError as error:
        sys.stderr.write(f"lockstep dashboard: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 0


def _export(options: argparse.Namespace) -> int:
    try:
        from lockstep.observability.dashboard.export import export_page
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'lockstep-rl[dashboard]'") from error
    _check_paths(options.paths)
    num_bytes, num_left_out = export_page(Runs(options.paths or [DEFAULT_FOLDER]), options.export)
    more = f"; {num_left_out} answers left out to keep it small" if num_left_out else ""
    sys.stdout.write(f"wrote {options.export} ({num_bytes / 1e6:.1f} MB{more}): open it in a browser, or send it\n")
    return 0


def _check_paths(paths: Sequence[Path]) -> None:
    if missing := [str(path) for path in paths if not path.expanduser().exists()]:
        raise ValueError(f"{missing[0]} does not exist: name a run's folder, or a folder of runs")


def _serve(options: argparse.Namespace) -> int:
    if options.parent is not None:
        _end_with(options.parent)
    try:
        from lockstep.observability.dashboard.app import DashboardApp, DashboardServer, plotly_script
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'lockstep-rl[dashboard]'") from error
    plotly_script()
    _check_paths(options.paths)
    runs = Runs(options.paths or [DEFAULT_FOLDER])
    token = options.token or os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not is_loopback(options.host):
        raise ValueError(
            f"--host {options.host} is not loopback: set --token, or the environment variable {TOKEN_VARIABLE}"
        )
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token):
        raise ValueError("the token must be printable ASCII text without spaces around it")
    listener = _listener(options)
    host, port = listener.getsockname()[:2]
    stops = "(Ctrl-C stops)" if options.parent is None else "until the run ends"
    shown = f"[{host}]" if ":" in host else host
    _tell(f"{ADDRESS}http://{shown}:{port}/{f'?token={quote(token)}' if token else ''} {stops}\n")
    _read_ahead(runs)
    DashboardServer(DashboardApp(runs, token)).run(sockets=[listener])
    return 0


def _read_ahead(runs: Runs) -> None:
    """Look for runs, and read the metrics of the one that the page shows first, while the browser opens it."""

    def read() -> None:
        newest = max(runs.all(), key=lambda run: run.written_ns(METRICS_FILE), default=None)
        if newest is None:
            _tell(f"no runs in {', '.join(map(str, runs.paths))} yet: the page shows them when they begin\n")
        else:
            newest.metrics.names()

    threading.Thread(target=read, daemon=True).start()


def _end_with(parent: int) -> None:
    """Be a child of a run: work only when it leaves time, and end when it ends, however it does."""
    os.nice(NICENESS)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _listener(options: argparse.Namespace) -> socket.socket:
    """At the port of the options; beside a run at the next one that is free."""
    host, wanted = options.host, options.port
    if not 0 <= wanted <= 65535:
        raise ValueError(f"--port {wanted}: must be 0 to 65535")
    if options.parent is not None and wanted != 0:
        for port in range(wanted, min(wanted + PORTS_TRIED, 2**16)):
            with suppress(OSError, ValueError):  # taken
                return _listening(host, port)
        wanted = 0
    try:
        return _listening(host, wanted)
    except OSError as error:
        raise ValueError(f"--host {host}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{error}; choose another --port (0 takes a free one)") from error


def _listening(host: str, port: int) -> socket.socket:
    """Who connects before the server runs waits, and is not refused."""
    listener = bind(host, port)
    listener.listen()
    return listener


def _tell(text: str) -> None:
    """To standard output, if anybody reads it."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep dashboard",
        description="Show runs in a browser: health, curves, rollouts with their tokens, time and memory.",
        epilog="docs/dashboard.md describes the page.",
    )
    add = parser.add_argument
    add(
        "paths",
        nargs="*",
        type=Path,
        metavar="RUN",
        help=f"a run's folder, or a folder of runs; default: {DEFAULT_FOLDER}",
    )
    add("--host", default="127.0.0.1", help="address; default: %(default)s. Others than loopback need a token")
    add("--port", type=int, default=8420, help="0 takes a free one; default: %(default)s")
    add("--token", help=f"what the browser must send once as ?token=; default: the variable {TOKEN_VARIABLE}")
    add("--parent", type=int, help=argparse.SUPPRESS)  # `trainer.dashboard`: the process that starts this one
    add("--export", type=Path, metavar="FILE", help="write one page with what there is now, to send; nothing is served")
    return parser
