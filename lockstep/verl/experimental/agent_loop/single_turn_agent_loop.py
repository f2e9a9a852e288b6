"""verl.experimental.agent_loop.single_turn_agent_loop"""

from typing import Any
from uuid import uuid4

from lockstep.agents.loops import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from lockstep.verl.utils.rollout_trace import rollout_trace_op


class SingleTurnAgentLoop(AgentLoopBase):
    """One response to the prompt, on token ids. The built-in `single_turn_agent` does the same without a loop per row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_length = self.config.actor_rollout_ref.rollout.prompt_length
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        response_ids = output.token_ids[: self.response_length]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            response_logprobs=output.log_probs[: self.response_length],
            num_turns=2,
            metrics=AgentLoopMetrics(num_preempted=output.num_preempted),
        )
