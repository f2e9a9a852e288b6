"""A policy that says what a test wants, and what a loop needs besides it."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lockstep.agents.agents import Agents
from lockstep.agents.conversation import Conversation
from lockstep.config.actor_rollout_ref import AgentConfig, MultiTurnConfig, RolloutConfig
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


class Scripted:
    """Answers the k-th request with the k-th text and the end token; cut to `max_tokens`."""

    def __init__(self, *texts: str, tokenizer: Any = TOKENIZER) -> None:
        self.texts = list(texts)
        self.tokenizer = tokenizer
        self.requests: list[GenerationRequest] = []

    async def __call__(self, request: GenerationRequest) -> Completion:
        await asyncio.sleep(0)
        number = len(self.requests)
        self.requests.append(request)
        ids = [*self.tokenizer(self.texts[number], add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        ended = len(ids) <= request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        return Completion(ids, [-0.5] * len(ids), "stop" if ended else "length", [number] * len(ids))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_agents(
    response_length: int = 400, loops: str | None = None, loop: str = "single_turn_agent", **multi_turn: Any
) -> Agents:
    """loops: `agent_loop_config_path`. loop: `default_agent_loop`."""
    rollout = RolloutConfig(
        seed=0,
        prompt_length=100,
        response_length=response_length,
        log_prob_use_dynamic_bsz=False,
        log_prob_max_token_len_per_gpu=1000,
        multi_turn=MultiTurnConfig(**multi_turn),
        agent=replace(AgentConfig(), agent_loop_config_path=loops, default_agent_loop=loop),
    )
    return Agents(rollout, TOKENIZER, [END])


def converse(
    agents: Agents, policy: Callable[[GenerationRequest], Any], agent_name: str = "tool_agent", **row: Any
) -> Conversation:
    row = {"raw_prompt": [{"role": "user", "content": "Q"}], "agent_name": agent_name, **row}
    prompt_ids = agents.renderer.ids(row["raw_prompt"], agents.tools_of(row))
    sampling = SamplingParams(max_tokens=agents.config.response_length)

    async def run() -> Conversation:
        async with agents.running():
            return await agents.converse(row, prompt_ids, policy, sampling, seed=7)

    return asyncio.run(run())


def sampled_texts(conversation: Conversation) -> list[str]:
    """The text of each run of sampled tokens."""
    found, last = [], 0
    for token, is_sampled in zip(conversation.trajectory.response_ids, conversation.trajectory.response_mask):
        if is_sampled and not last:
            found.append([])
        if is_sampled:
            found[-1].append(token)
        last = is_sampled
    return [TOKENIZER.decode(ids) for ids in found]


def roles(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]
