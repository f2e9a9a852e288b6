"""Tool use (ToolRL, arXiv 2504.13958): 1 point for the format, -3 to 3 for the tool calls.

The ground truth is a reference response: `<think>`, then `<tool_call>` with one JSON object per line and/or `<response>`;
the response must have the same parts.
"""

import json
import re
from collections import Counter
from typing import Any

MAX_CALLS_REWARD, MIN_CALLS_REWARD = 3.0, -3.0
TEMPLATES = {
    "llama": ("<|start_header_id|>assistant<|end_header_id|>", "<|eot_id|>"),
    "qwen": ("<|im_start|>assistant", "<|im_end|>"),
}

Call = dict[str, Any]
"""`{"name": str, "parameters": {name: value}}`."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`score` is the sum of `format_reward` and `accuracy_reward`.

    extra_info.experiment_name: contains `llama` or `qwen` and selects the chat template around the response; without the
    key the text is used unchanged.
    """
    response = unwrap(solution_str, (extra_info or {}).get("experiment_name"))
    format_reward, accuracy_reward = score_format(response, ground_truth), score_calls(response, ground_truth)
    return {
        "score": format_reward + accuracy_reward,
        "format_reward": format_reward,
        "accuracy_reward": accuracy_reward,
    }


def unwrap(solution_str: str, experiment_name: str | None) -> str:
    """The assistant's text without the chat template around it."""
    if experiment_name is None:
        return solution_str.strip()
    for family, (start, end) in TEMPLATES.items():
        if family in experiment_name:
            return solution_str.rpartition(start)[2].partition(end)[0].strip()
    raise ValueError(f"extra_info.experiment_name={experiment_name!r}: the name must contain {' or '.join(TEMPLATES)}")


def score_format(response: str, ground_truth: str) -> float:
    """1 if the response has the parts of the ground truth, each once and in order, else 0."""
    pattern = "<think>.*?</think>"
    tags = []
    if "<tool_call>" in ground_truth:
        pattern, tags = pattern + "\n<tool_call>\n.*?\n</tool_call>", ["tool_call"]
    if "<response>" in ground_truth:
        pattern, tags = pattern + "\n<response>.*?</response>", [*tags, "response"]
    once = all(response.count(f"<{tag}>") == response.count(f"</{tag}>") == 1 for tag in tags)
    return float(once and re.search(f"^{pattern}$", response, re.DOTALL) is not None)


def score_calls(response: str, ground_truth: str) -> float:
    """From -3 for missing or malformed calls to 3 for the expected ones; 0 if no call is expected."""
    if "<tool_call>" not in ground_truth:
        return 0.0
    wanted = read_calls(ground_truth)
    if "<tool_call>" not in response or "</tool_call>" not in response:
        return MIN_CALLS_REWARD
    try:
        share = matching_share(wanted, read_calls(response))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # not JSON, or not a call
        return MIN_CALLS_REWARD
    return MIN_CALLS_REWARD + (MAX_CALLS_REWARD - MIN_CALLS_REWARD) * share


def read_calls(text: str) -> list[Call]:
    """The calls in the first tool-call tags, one JSON object per line."""
    return [json.loads(line) for line in text.split("<tool_call>")[1].split("</tool_call>")[0].strip().split("\n")]


def matching_share(wanted: list[Call], given: list[Call]) -> float:
    """Fraction of the calls that matches: names, parameter names and values weigh the same, order does not matter."""
    if wanted == given:
        return 1.0
    points = overlap([call["name"] for call in wanted], [call["name"] for call in given])
    most = 1.0 + sum(1.0 + len(call["parameters"]) for call in wanted)
    unused = list(given)
    for call in wanted:
        scored = [
            (score_parameters(call["parameters"], other), other) for other in unused if other["name"] == call["name"]
        ]
        best, match = max(scored, key=lambda pair: pair[0], default=(0.0, None))
        if best > 0:
            points += best
            unused = [other for other in unused if other is not match]
    return points / most


def score_parameters(wanted: dict[str, Any], call: Call) -> float:
    given = call["parameters"]
    return overlap(list(wanted), list(given)) + sum(name in given and given[name] == wanted[name] for name in wanted)


def overlap(wanted: list[str], given: list[str]) -> float:
    """Multiset intersection over union."""
    if wanted == given:
        return 1.0
    union = Counter(wanted) | Counter(given)
    return (Counter(wanted) & Counter(given)).total() / union.total() if wanted and given else 0.0
