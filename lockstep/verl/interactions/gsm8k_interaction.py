"""verl.interactions.gsm8k_interaction"""

from collections.abc import Mapping
from typing import Any

from lockstep.agents.interactions import gsm8k


class Gsm8kInteraction(gsm8k.Gsm8kInteraction):
    """Keeps `response`, `ground_truth` and `reward` of each conversation in `_instance_dict`, by id."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        instance_id = await super().start_interaction(instance_id, ground_truth, **kwargs)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answer = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        ends, text, score, more = await super().generate_response(instance_id, messages, **kwargs)
        self._instance_dict[instance_id] |= {"response": answer, "reward": score}
        return ends, text, score, more

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """1 if the last response is correct."""
        response = self._instance_dict[instance_id or ""]["response"]
        _, _, score, _ = await super().generate_response(
            instance_id or "", [{"role": "assistant", "content": response}]
        )
        return score

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """KeyError for an id that was not started."""
        del self._instance_dict[instance_id or ""]
        await super().finalize_interaction(instance_id, **kwargs)
