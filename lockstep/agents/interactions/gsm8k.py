"""The GSM8K interaction: a user who says whether the answer is correct, and asks again if it is not."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from lockstep.agents.interactions.interaction import INTERACTIONS, BaseInteraction
from lockstep.rewards.scorers.gsm8k import TAIL_CHARS

NUMBER = re.compile(r"-?(?:[0-9][0-9,]*)?\.?[0-9]+")
CORRECT = "Your answer is correct."
WRONG = "Your answer is wrong. Think about it again, and give a new answer."


@INTERACTIONS.register("gsm8k")
class Gsm8kInteraction(BaseInteraction):
    """Compares the last number of each turn with the last one of `ground_truth`; the conversation ends with the first equal one.

    Numbers are compared by value: `9.` at the end of a sentence is 9, and `1,000` is 1000.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, Decimal] = {}

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("ground_truth") is None:
            raise ValueError("the row has no interaction_kwargs.ground_truth")
        if _number(str(kwargs["ground_truth"])) is None:
            raise ValueError(
                f"interaction_kwargs.ground_truth={kwargs['ground_truth']!r} has no number, so no answer would be correct"
            )

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        self.check_kwargs({"ground_truth": ground_truth})
        instance_id = await super().start_interaction(instance_id)
        truth = _number(str(ground_truth))
        assert truth is not None
        self._truths[instance_id] = truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answer = next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
        is_correct = _number(answer) == self._truths[instance_id]
        return is_correct, CORRECT if is_correct else WRONG, float(is_correct), {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        self._truths.pop(instance_id or "", None)


def _number(text: str) -> Decimal | None:
    """The last number of the text; None if there is none."""
    numbers = NUMBER.findall(text[-TAIL_CHARS:])
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
