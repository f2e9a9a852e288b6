"""`lockstep dashboard [RUN or folder of runs]`: serves the page until Ctrl-C."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.observability.dashboard.runs import Runs
from lockstep.utils.local_http import bind, is_loopback

TOKEN_VARIABLE = "LOCKSTEP_DASHBOARD_TOKEN"


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        return _serve(options)
    except ValueError as error:
        sys.stderr.write(f"lockstep dashboard: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 0


def _serve(options: argparse.Namespace) -> int:
    try:
        import uvicorn

        from lockstep.observability.dashboard.app import DashboardApp, plotly_script
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'lockstep-rl[dashboard]'") from error
    plotly_script()
    if missing := [str(path) for path in options.paths if not path.expanduser().exists()]:
        raise ValueError(f"{missing[0]} does not exist: name a run's folder, or a folder of runs")
    token = options.token or os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not is_loopback(options.host):
        raise ValueError(
            f"--host {options.host} is not loopback: set --token, or the environment variable {TOKEN_VARIABLE}"
        )
    listener = bind(options.host, options.port)
    app = DashboardApp(Runs(options.paths), token).app
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"dashboard at http://{shown}:{port}/{f'?token={token}' if token else ''} (Ctrl-C stops)\n")
    sys.stdout.flush()
    config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


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
        default=[Path("checkpoints")],
        metavar="RUN",
        help="a run's folder, or a folder of runs; default: checkpoints",
    )
    add("--host", default="127.0.0.1", help="address; default: %(default)s. Others than loopback need a token")
    add("--port", type=int, default=8265, help="0 takes a free one; default: %(default)s")
    add("--token", help=f"what the browser must send once as ?token=; default: the variable {TOKEN_VARIABLE}")
    return parser
