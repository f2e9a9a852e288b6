"""Programs on a SandboxFusion server (`reward_model.sandbox_fusion.url`) in place of a sandbox of this machine.

source and its binary stdin ─► POST /run_code: Python that runs the source with decoded stdin ─► its stdout, in base64
"""

import base64
import functools
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lockstep.config.reward import SandboxFusionConfig
from lockstep.rewards.sandbox.process import SandboxError
from lockstep.utils import event_loop
from lockstep.utils.json_http import HttpError, post_json

VARIABLE = "LOCKSTEP_SANDBOX_FUSION"
"""Environment variable with the settings, for the processes of reward functions."""
REQUEST_MARGIN_S = 60.0
"""Time of a request besides that of the program: queue, container start, retries."""
KEY = "reward_model.sandbox_fusion"

# stdin is decoded and stdout encoded in other processes: what the source has not read is in no memory that its children copy.
RUN = """
import base64, ctypes, os

ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: other processes cannot read the memory
decoded, to_decoded = os.pipe()
encoded, to_encoded = os.pipe()


def convert(function, source, target):
    if os.fork():
        return
    for descriptor in {{0, 1, decoded, to_decoded, encoded, to_encoded}} - {{source, target}}:
        os.close(descriptor)
    with os.fdopen(source, "rb") as data, os.fdopen(target, "wb") as result:
        result.write(function(data.read()))
    os._exit(0)


convert(base64.b64decode, 0, to_decoded)
convert(base64.b64encode, encoded, 1)
os.dup2(decoded, 0)
os.dup2(to_encoded, 1)
for descriptor in (decoded, to_decoded, encoded, to_encoded):
    os.close(descriptor)
try:
    exec(compile(base64.b64decode({source!r}), "source", "exec"), {{"__name__": "__main__"}})
finally:
    os.close(0)
    os.close(1)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
"""


def configure(config: SandboxFusionConfig) -> None:
    """Use these settings in this process and in those that it starts."""
    if config.url is not None and not config.url.startswith(("http://", "https://")):
        raise ValueError(f"{KEY}.url={config.url}: must be a URL such as http://host:8080/run_code, or null")
    if config.url is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = json.dumps(asdict(config))


def settings() -> SandboxFusionConfig | None:
    """None if programs run on this machine."""
    text = os.environ.get(VARIABLE)
    return SandboxFusionConfig(**json.loads(text)) if text else None


def run_source(source: str, stdin: bytes, wall_s: float) -> tuple[bytes, str | None]:
    """stdout of Python source, and why it was stopped if it was; SandboxError if the server did not run it."""
    config = settings()
    assert config is not None and config.url is not None
    body = {
        "code": RUN.format(source=base64.b64encode(source.encode())),
        "stdin": base64.b64encode(stdin).decode(),
        "language": "python",
        "run_timeout": wall_s,
        "memory_limit_MB": config.memory_limit_mb,
    }
    url = config.url
    try:
        with _slots(config.max_concurrent):
            answer = event_loop.run(lambda: post_json(url, body, timeout_s=wall_s + REQUEST_MARGIN_S))
    except HttpError as error:
        raise SandboxError(f"{KEY}.url: {error}") from error
    return _result_of(answer)


def _result_of(answer: Any) -> tuple[bytes, str | None]:
    result = answer.get("run_result") if isinstance(answer, Mapping) else None
    if not isinstance(result, Mapping) or answer.get("status") == "SandboxError":
        message = answer.get("message") if isinstance(answer, Mapping) else answer
        raise SandboxError(f"{KEY}.url: the server did not run the program: {str(message)[:300]}")
    if result.get("status") == "TimeLimitExceeded":
        return b"", "took too long"
    try:
        output = base64.b64decode(str(result.get("stdout") or "").strip(), validate=True)
    except ValueError:
        return b"", "its output cannot be read"
    code = result.get("return_code") or 0
    last = str(result.get("stderr") or "").strip().rpartition("\n")[2]
    return output, f"exit code {code}: {last[:300]}" if code else None


@functools.cache
def _slots(number: int) -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(max(1, number))
