"""verl.workers.rollout.llm_server: single requests, on token ids, to a rollout's worker group.

LLMServerManager(config, worker_group) ─► get_client() ─► await client.generate(...) ─► TokenOutput

The workers of a group train only while no client serves requests: call `sleep` before an update.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from lockstep.agents.loops.agent_loop_base import TokenOutput
from lockstep.protocol.generation import GenerationRequest
from lockstep.verl._config import typed_config
from lockstep.verl._names import exports
from lockstep.verl.utils.ray_utils import auto_await
from lockstep.workers.rollout_batch import sampling_params as sampling_of
from lockstep.workers.rollout_client import RolloutClient

__getattr__ = exports(__name__)

SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}


def rollout_group(handles: Any) -> Any:
    """The worker group that generates, given alone, in a list, or as the trainer wraps it."""
    group = handles[0] if isinstance(handles, Sequence) else handles
    return vars(group).get("_group", group)


class LLMServerClient:
    """Sends requests to the workers of `server_handles`, a worker group; awakes them at the first request."""

    def __init__(self, config: Any, server_handles: Any, *unused: Any, **options: Any) -> None:
        self.config = config
        self._typed = typed_config(config, run_checks=False)
        self._client = RolloutClient(rollout_group(server_handles))
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **options: Any,
    ) -> TokenOutput:
        """The response to one prompt. Requests with the same id go to the same worker, for their common prefix.

        sampling_params: temperature, top_p, top_k, min_p, max_tokens, stop_token_ids; others are those of the rollout.
        """
        if image_data or video_data:
            raise ValueError("generate: only text is supported, not image_data or video_data")
        await self.wake_up()
        request = self._request(list(prompt_ids), sampling_params)
        done = await self._client.generate(request, key=request_id)
        reason = "aborted" if done.stop_reason == "abort" else "completed"
        return TokenOutput(done.token_ids, done.log_probs, reason, done.num_preempted)

    async def wake_up(self) -> None:
        """Let the workers generate; no-op if they do."""
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = asyncio.create_task(self._client.resume())
        elif self._loop is not asyncio.get_running_loop():
            raise RuntimeError("the client serves another event loop; call `sleep` in that one first")
        await self._starting

    async def sleep(self) -> None:
        """Give the workers back to training; unfinished requests go on after the next `wake_up`."""
        if self._starting is not None:
            await self._client.pause()
            self._starting = None

    def _request(self, prompt_ids: list[int], asked: Mapping[str, Any]) -> GenerationRequest:
        rollout = self._typed.actor_rollout_ref.rollout
        sampling = sampling_of(rollout, validate=False, greedy=False)
        changed = {name: kind(asked[name]) for name, kind in SAMPLING.items() if asked.get(name) is not None}
        room = rollout.prompt_length + rollout.response_length - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"generate: prompt_ids has {len(prompt_ids)} tokens, which leaves no room for an answer in "
                f"{rollout.prompt_length + rollout.response_length} (data.max_prompt_length + data.max_response_length)"
            )
        lengths = [asked[name] for name in ("max_tokens", "max_new_tokens") if asked.get(name) is not None]
        stops = (*sampling.stop_token_ids, *(asked.get("stop_token_ids") or ()))
        sampling = replace(sampling, max_tokens=min([room, *lengths]), stop_token_ids=stops, **changed)
        return GenerationRequest(prompt_ids, sampling, seed=rollout.seed + next(self._numbers))


class LLMServerManager:
    """Makes clients of a rollout's worker group. Other arguments of verl place servers, which the group replaces."""

    def __init__(self, config: Any, worker_group: Any = None, *placement: Any, **options: Any) -> None:
        if worker_group is None:
            raise ValueError("LLMServerManager needs worker_group: the worker group that generates")
        self.config, self.worker_group = config, worker_group
        self._client = LLMServerClient(config, worker_group)

    @classmethod
    async def create(cls, config: Any, worker_group: Any = None, *placement: Any, **options: Any) -> "LLMServerManager":
        return cls(config, worker_group, *placement, **options)

    def get_client(self) -> LLMServerClient:
        return self._client

    @auto_await
    async def wake_up(self) -> None:
        await self._client.wake_up()

    @auto_await
    async def sleep(self) -> None:
        await self._client.sleep()
