"""verl.utils.reward_score.sandbox_fusion.utils"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from lockstep.config.reward import SandboxFusionConfig
from lockstep.rewards.sandbox import fusion
from lockstep.rewards.scorers import prime_code

DEFAULT_TIMEOUT = 10


@contextmanager
def on_server(url: str | None, semaphore: Any = None, memory_limit_mb: int | None = None) -> Iterator[None]:
    """Programs run on the server inside; without a URL in local sandboxes."""
    before = fusion.settings()
    settings = SandboxFusionConfig(url=url)
    fusion.configure(replace(settings, memory_limit_mb=memory_limit_mb) if memory_limit_mb else settings)
    try:
        with semaphore or nullcontext():
            yield
    finally:
        fusion.configure(before or SandboxFusionConfig())


def check_correctness(
    sandbox_fusion_url: str | None,
    in_outs: dict[str, Any],
    generation: str,
    timeout: float = DEFAULT_TIMEOUT,
    memory_limit_mb: int = prime_code.MEMORY_MB,
    concurrent_semaphore: Any = None,
    language: str = "python",
) -> tuple[list[bool], list[dict[str, Any]]]:
    """Whether the program passes each test, and a description of each: `case_index`, `status` and `error`.

    in_outs: `inputs` and `outputs`, and `fn_name` to call a function. timeout: seconds per test.
    """
    if language != "python":
        raise ValueError(f"language={language}: only python programs are judged")
    tests = prime_code.read_tests(in_outs)
    with on_server(sandbox_fusion_url, concurrent_semaphore, memory_limit_mb):
        verdicts = prime_code.judge(generation, tests, len(tests), timeout, memory_limit_mb)
    missing = [{"passed": False, "error": "not run"}] * (len(tests) - len(verdicts))
    passed = [bool(verdict["passed"]) for verdict in (*verdicts, *missing)]
    details = [
        {"case_index": case, "status": "success" if verdict["passed"] else "failed", "error": verdict["error"]}
        for case, verdict in enumerate((*verdicts, *missing))
    ]
    return passed, details
