"""The demo's reward function with a tool. Each run has a copy in its folder, set as `custom_reward_function.path`."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """1 if the last turn is an equals sign and the product, else 0.

    acc:  the same value, reported by validation as accuracy.
    tool: whether the calculator was called.
    """
    turns = extra_info["messages"]
    right = float(turns[-1]["role"] == "assistant" and turns[-1]["content"] == f"={ground_truth}")
    return {"score": right, "acc": right, "tool": float(any(turn["role"] == "tool" for turn in turns))}
