"""Environments: the reward that the conversation's own tools, environment or program gave it."""

from collections.abc import Mapping
from typing import Any


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """See `conversation_reward`; 0 if nothing gave a reward, such as an environment never used."""
    scores = (extra_info or {}).get("rollout_reward_scores")
    if scores is None:
        raise ValueError("the scorer environment_reward needs responses of agents; see docs/agents.md")
    return conversation_reward(scores)


def conversation_reward(scores: Mapping[str, float]) -> float:
    """`reward` of `rollout_reward_scores`: an environment's other numbers are parts of it, or metrics.

    Without it, the sum of the tools' rewards.
    """
    return float(scores["reward"] if "reward" in scores else sum(scores.values()))
