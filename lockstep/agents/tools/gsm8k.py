"""The GSM8K tool: the policy submits its answer before it ends, and sees whether it is correct."""

from typing import Any

from lockstep.agents.schemas import OpenAIFunctionToolSchema, ToolResponse
from lockstep.agents.tools.tool import TOOLS, BaseTool, Executed, tool_schema
from lockstep.rewards.scorers.gsm8k import compute_score

WORSE_ANSWER = -0.05
"""Reward of a submission that is no better than the one before."""


@TOOLS.register("gsm8k")
class Gsm8kTool(BaseTool):
    """Checks an answer against `create_kwargs.ground_truth`; the conversation's reward is that of the last answer."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._instances: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        answer = {"type": "string", "description": "The answer, a number."}
        return tool_schema(
            "calc_gsm8k_reward",
            "Check an answer to the problem; the result is 1.0 if it is correct, else 0.0.",
            answer=answer,
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        truth = ground_truth if ground_truth is not None else kwargs.get("create_kwargs", {}).get("ground_truth")
        if truth is None:
            raise ValueError(f"the row has no tools_kwargs.{self.name}.create_kwargs.ground_truth")
        self._instances[instance_id] = {"ground_truth": str(truth), "answer": "", "reward": 0.0}
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        instance = self._instances[instance_id]
        answer = str(parameters["answer"])
        instance["answer"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > instance["reward"] else WORSE_ANSWER
        instance["reward"] = reward
        return ToolResponse(text=f"{answer}: reward {reward}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        instance = self._instances[instance_id]
        return float(compute_score(instance["answer"], instance["ground_truth"], method="flexible"))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instances.pop(instance_id, None)
