"""verl.experimental.agent_loop.agent_loop: rows to conversations, on the workers of a rollout.

prompts ─► AgentLoopManager.generate_sequences ─► AgentLoopWorker: a conversation per row ─► worker group
        ◄─ a batch with responses, masks, rewards of tools and turns
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lockstep.agents.loops import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from lockstep.agents.loops.agent_loop import AGENT_LOOPS
from lockstep.protocol import DataProto, object_array
from lockstep.trainer.ppo.agent_rollout import AgentRollout
from lockstep.trainer.ppo.run_agents import agent_setup
from lockstep.verl._config import typed_config
from lockstep.verl._names import exports
from lockstep.verl._registry import RegistryView
from lockstep.verl._whole_batches import sampling_inputs
from lockstep.verl.utils.ray_utils import auto_await
from lockstep.verl.workers.rollout.llm_server import LLMServerClient as AsyncLLMServerManager, rollout_group

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AsyncLLMServerManager",
    "get_trajectory_info",
    "register",
]

__getattr__ = exports(__name__)

_agent_loop_registry = RegistryView(AGENT_LOOPS)


async def get_trajectory_info(step: int, index: Sequence[Any], validate: bool) -> list[dict[str, Any]]:
    """For each row its step, the number of its prompt, and which of the prompt's samples it is."""
    seen: Counter[Any] = Counter()
    rows = []
    for number in index:
        rows.append({"step": step, "sample_index": number, "rollout_n": seen[number], "validate": validate})
        seen[number] += 1
    return rows


class AgentLoopWorker:
    """Holds the conversations of a batch concurrently. server_handles: the worker group of the rollout, alone or in a list."""

    def __init__(self, config: Any, server_handles: Any, reward_router_address: str | None = None) -> None:
        self.config = config
        self._typed = typed_config(config, run_checks=False)
        setup = agent_setup(self._typed)
        self.agents = setup.make_agents()
        self.tokenizer = self.agents.tokenizer
        batch_size = self._typed.data.train_batch_size * self._typed.actor_rollout_ref.rollout.n
        group = rollout_group(server_handles)
        self._rollout = AgentRollout(self.agents, group, self.tokenizer.pad_token_id, batch_size)
        self._draws: Counter[tuple[int, bool]] = Counter()

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """One conversation per row.

        Reads `raw_prompt`, or `raw_prompt_ids` of single-turn rows, and `agent_name`, `tools_kwargs`, `interaction_kwargs`.
        meta_info: `validate` samples as validation does, `do_sample=False` greedily; `global_steps` is part of the samples' seeds.
        """
        output = await asyncio.to_thread(self._rollout.generate_sequences, self._inputs(batch))
        output.meta_info.setdefault("timing", {})
        return output

    def close(self) -> None:
        """End what the tools keep."""
        self.agents.close()

    def _inputs(self, batch: DataProto) -> DataProto:
        info, columns = batch.meta_info, dict(batch.non_tensor_batch)
        columns.setdefault("uid", object_array([str(row) for row in range(len(batch))]))
        rows = [{name: values[row] for name, values in columns.items()} for row in range(len(batch))]
        columns["raw_prompt_ids"] = object_array([self._prompt_ids(row) for row in rows])
        validate, step = bool(info.get("validate", False)), int(info.get("global_steps", 0))
        self._draws[step, validate] += 1
        seed = self._typed.actor_rollout_ref.rollout.seed
        return sampling_inputs(columns, info, seed, step, self._draws[step, validate])

    def _prompt_ids(self, row: dict[str, Any]) -> list[int]:
        if row.get("raw_prompt") is not None:
            return self.agents.renderer.ids(list(row["raw_prompt"]), self.agents.tools_of(row))
        if row.get("raw_prompt_ids") is not None:
            return list(row["raw_prompt_ids"])
        raise ValueError(f"generate_sequences needs raw_prompt or raw_prompt_ids; got {sorted(row)}")


class AgentLoopManager:
    """Runs the agent loops of a batch on a rollout's worker group.

    config:       the program's config.
    worker_group: of `ActorRolloutRefWorker`, such as `actor_rollout_wg` after `init_workers`. Its workers train only while
                  no batch is being generated.
    Other arguments of verl place and start servers, which the worker group replaces.
    """

    agent_loop_workers_class: type[AgentLoopWorker] = AgentLoopWorker

    def __init__(self, config: Any, worker_group: Any = None, *placement: Any, **options: Any) -> None:
        if worker_group is None:
            raise ValueError("AgentLoopManager needs worker_group: the worker group that generates")
        self.config, self.worker_group = config, worker_group
        self.agent_loop_workers = [self.agent_loop_workers_class(config, [worker_group])]

    @classmethod
    async def create(cls, config: Any, worker_group: Any = None, *placement: Any, **options: Any) -> "AgentLoopManager":
        return await asyncio.to_thread(cls, config, worker_group, *placement, **options)

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response per row; repeat the rows first for several samples per prompt. May be awaited."""
        return await self.agent_loop_workers[0].generate_sequences(prompts)

    def wake_up(self) -> None:
        """No-op: `generate_sequences` wakes the workers."""

    def sleep(self) -> None:
        """No-op: the workers sleep when `generate_sequences` returns."""

    def clear_kv_cache(self) -> None:
        """No-op: each call begins with an empty cache."""
