"""Search QA, multiple choice and tool calls on hand-written responses."""

import json
from typing import Any

import numpy as np
import pytest

from lockstep.rewards.scorers import environment_reward, multiple_choice, rlla, search_r1_like_qa_em


@pytest.mark.parametrize(
    ("text", "target", "exact", "part"),
    [
        ("<answer>The  Paris!</answer>", ["paris"], 1.0, 1.0),
        ("<answer>Obama</answer><answer>Bush</answer>", "Obama", 0.1, 0.1),
        ("<answer>New York City</answer>", ["New York", "NYC"], 0.1, 1.0),
        ("<answer>NYC</answer>", np.array(["New York", "nyc"], dtype=object), 1.0, 1.0),
        ("<answer>\n42\n</answer>", [42], 1.0, 1.0),
        ("Paris", ["Paris"], 0.0, 0.0),
    ],
)
def test_search_qa(text: str, target: Any, exact: float, part: float) -> None:
    truth = {"target": target}
    assert search_r1_like_qa_em.compute_score(text, truth, format_score=0.1) == exact
    assert search_r1_like_qa_em.compute_score_subem(text, truth, format_score=0.1) == part


def test_search_qa_penalises_guessing() -> None:
    assert search_r1_like_qa_em.compute_score("<answer>x</answer>" * 10, {"target": "x"}) == 1.0
    assert search_r1_like_qa_em.compute_score("<answer>x</answer>" * 11, {"target": "x"}) == 0.25


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("Answer: B", "B"),
        ("**Answer:** (C)", "C"),
        ("The correct answer is D.", "D"),
        ("the answer is: **A**", "A"),
        (r"so \boxed{B}", "B"),
        (r"so \boxed{\text{B}}", "B"),
        (r"so \boxed{B: the moon}", "B"),
        ("option\n\n is: B", None),
        ("the answer is\n\n **(B)**", "B"),
        ("<answer>A</answer> no, <answer>B or <answer>C</answer>", "B"),
        ("<answer> (D) </answer>", "D"),
        ("Answer: A. No, answer: C", "C"),
        (r"Answer: A, hence \boxed{\Delta E}", None),
        ("Answer: Because", None),
        ("A or B", None),
        ("", None),
    ],
)
def test_multiple_choice_extraction(text: str, choice: str | None) -> None:
    assert multiple_choice.extract_choice(text) == choice


def test_multiple_choice_scores() -> None:
    assert multiple_choice.compute_score("Answer: B", "B") == {"score": 1.0, "acc": True, "pred": "B"}
    assert multiple_choice.compute_score("Answer: B", 1)["score"] == 1.0
    assert multiple_choice.compute_score("Answer: C", "(B)", format_score=0.1)["score"] == 0.1
    assert multiple_choice.compute_score("B", "B") == {"score": 0.0, "acc": False, "pred": None}
    with pytest.raises(ValueError, match="ground_truth='blue': multiple choice expects a letter"):
        multiple_choice.compute_score("Answer: B", "blue")


def response(*calls: dict[str, Any], thought: str = "x") -> str:
    lines = "\n".join(json.dumps(call) for call in calls)
    return f"<think>{thought}</think>\n<tool_call>\n{lines}\n</tool_call>"


def call(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


F, G = call("f", a=1, b="z"), call("g")


@pytest.mark.parametrize(
    ("given", "wanted", "format_reward", "accuracy_reward"),
    [
        (response(F), response(F), 1.0, 3.0),
        (response(G, F), response(F, G), 1.0, 3.0),
        # names 1 + parameter names 1 + values 1 of the most 1 + 1 + 2
        (response(call("f", a=2, b="z")), response(F), 1.0, -3.0 + 6.0 * 3 / 4),
        # one of two names 1/2, then 1 + 2 of f and nothing of g: most is 1 + (1 + 2) + (1 + 0)
        (response(F), response(F, G), 1.0, -3.0 + 6.0 * 3.5 / 5),
        (response(call("h")), response(F), 1.0, -3.0),
        (response({"name": "f"}), response(F), 1.0, -3.0),
        ("<think>x</think>\n<tool_call>\nno json\n</tool_call>", response(F), 1.0, -3.0),
        ("<think>x</think>\n<tool_call>\n" + "[" * 10_000 + "\n</tool_call>", response(F), 1.0, -3.0),
        ("broken", response(F), 0.0, -3.0),
        ("<think>x</think>\n<response>hi</response>", "<think>y</think>\n<response>yo</response>", 1.0, 0.0),
        ("<think>x</think>", "<think>y</think>", 1.0, 0.0),
    ],
)
def test_tool_calls(given: str, wanted: str, format_reward: float, accuracy_reward: float) -> None:
    result = rlla.compute_score("rlla", given, wanted)
    assert result["format_reward"] == format_reward
    assert result["accuracy_reward"] == pytest.approx(accuracy_reward)
    assert result["score"] == result["format_reward"] + result["accuracy_reward"]


def test_tool_calls_within_a_chat_template() -> None:
    for name, text in {
        "qwen-7b": f"<|im_start|>assistant\n{response(F)}<|im_end|>",
        "llama3": f"<|start_header_id|>assistant<|end_header_id|>\n\n{response(F)}<|eot_id|>",
    }.items():
        assert rlla.compute_score("rlla", text, response(F), {"experiment_name": name})["score"] == 4.0
    with pytest.raises(ValueError, match=r"extra_info\.experiment_name='gemma': the name must contain llama or qwen"):
        rlla.compute_score("rlla", "", response(F), {"experiment_name": "gemma"})


def test_the_reward_of_an_environment_is_the_sum_of_what_its_tools_gave() -> None:
    given = {"rollout_reward_scores": {"read": 0.25, "write": 0.5}}
    assert environment_reward.compute_score("text", None, given) == 0.75
    assert environment_reward.compute_score("text", None, {"rollout_reward_scores": {}}) == 0.0
    metrics = {"rollout_reward_scores": {"steps": 3.0, "reward": 0.5}}
    assert environment_reward.compute_score("text", None, metrics) == 0.5
    with pytest.raises(ValueError, match="needs responses of agents"):
        environment_reward.compute_score("text", None, {})
