"""Environments: the reward that the conversation's own tools, environment or program gave it."""

from typing import Any


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """The sum of `rollout_reward_scores` (docs/agents.md); 0 if nothing gave a reward, such as an environment never used."""
    scores = (extra_info or {}).get("rollout_reward_scores")
    if scores is None:
        raise ValueError("the scorer environment_reward needs responses of agents; see docs/agents.md")
    return float(sum(scores.values()))
