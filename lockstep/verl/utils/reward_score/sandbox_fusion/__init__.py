"""verl.utils.reward_score.sandbox_fusion: programs judged on a SandboxFusion server."""

from typing import Any

from lockstep.rewards.scorers import prime_code
from lockstep.verl.utils.reward_score.sandbox_fusion.utils import on_server


def compute_score(
    sandbox_fusion_url: str | None,
    concurrent_semaphore: Any,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: str | dict[str, Any],
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[Any]]:
    """(score, one verdict per test), as `prime_code`. concurrent_semaphore: held during the requests; None is no limit."""
    with on_server(sandbox_fusion_url, concurrent_semaphore, memory_limit_mb):
        score, verdicts = prime_code.compute_score(
            completion, test_cases, continuous, timeout, memory_limit_mb or prime_code.MEMORY_MB
        )
    return score, list(verdicts)
