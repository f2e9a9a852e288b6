"""A real vLLM server on loopback, started as docs/servers.md says."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.engines.rollout.server.protocols import EXTENSION

ROOT = Path(__file__).parents[1]
SMALL = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 16 --kv-cache-memory-bytes 67108864"
START_S = 600


@contextmanager
def vllm_server(model: Path, log: Path, extension: str = EXTENSION) -> Iterator[str]:
    """Its URL; it starts with random weights. extension: what loads weights in its workers."""
    page = (ROOT / "docs" / "servers.md").read_text().replace("\\\n", " ")
    flags = re.search(r"^vllm serve \$MODEL (.*?)$", page, re.M)
    assert flags is not None and EXTENSION in flags[1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # the module that `vllm serve` runs: the CPU build's command asks for the version of a package `vllm`
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += flags[1].replace(EXTENSION, extension).split()
    command += f"--host 127.0.0.1 --port {port} {SMALL} --load-format dummy".split()
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(ROOT),
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _is_up(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False
