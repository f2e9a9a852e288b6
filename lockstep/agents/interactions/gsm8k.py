"""The GSM8K interaction: a user who says whether the answer is correct, and asks again if it is not."""

from collections.abc import Mapping
from typing import Any

from lockstep.agents.interactions.base import INTERACTIONS, BaseInteraction
from lockstep.rewards.scorers.gsm8k import compute_score

CORRECT = "Your answer is correct."
WRONG = "Your answer is wrong. Think about it again, and give a new answer."


@INTERACTIONS.register("gsm8k")
class Gsm8kInteraction(BaseInteraction):
    """Compares the last number of each turn with `ground_truth`; the conversation ends with the first correct one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, str] = {}

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("ground_truth") is None:
            raise ValueError("the row has no interaction_kwargs.ground_truth")

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        self.check_kwargs({"ground_truth": ground_truth})
        instance_id = await super().start_interaction(instance_id)
        self._truths[instance_id] = str(ground_truth)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answer = next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
        score = compute_score(answer, self._truths[instance_id], method="flexible")
        return bool(score), CORRECT if score else WRONG, score, {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        self._truths.pop(instance_id or "", None)
