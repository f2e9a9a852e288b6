"""The reward that the conversation's environment gave: `reward` of its `rollout_reward_scores` (docs/environments.md)."""

from typing import Any


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """The environment's reward as the score; its other numbers are logged."""
    scores = dict(extra_info.get("rollout_reward_scores") or {})
    if "reward" not in scores:
        raise ValueError(
            "the environment gave no reward: it failed (its first error is in the log), or no agent with one answered the row"
        )
    return {"score": scores.pop("reward"), **scores}
