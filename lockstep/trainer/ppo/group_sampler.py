"""One prompt in, its n scored samples out, for many prompts at once: rewards are computed while others still generate.

sample ─► n requests ─► RolloutClient ─► rows ─► GroupScorer ─► token_level_scores
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self, TypeVar

from lockstep.algorithms.advantages import required_inputs
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto
from lockstep.protocol.generation import Completion, GenerationRequest
from lockstep.trainer.ppo.group_scorer import GroupScorer
from lockstep.trainer.ppo.sampling import RewardFn, training_rows
from lockstep.workers.rollout_batch import batch_of, requests_of, sampling_params
from lockstep.workers.rollout_client import RolloutClient

T = TypeVar("T")


class GroupSampler:
    """Generates through `client` and scores as `Sampling` does: the same tokens, log-probs and scores for the same prompt.

    rm_wg:     None without a reward model.
    generated: when each group had all of its samples since `running` was entered, by `time.perf_counter`.
    """

    def __init__(
        self, config: PPOConfig, client: RolloutClient, rm_wg: Any, reward_fn: RewardFn, pad_token_id: int
    ) -> None:
        self.config = config
        self.client = client
        self.pad_token_id = pad_token_id
        self.n = config.actor_rollout_ref.rollout.n
        self.needs_baselines = "reward_baselines" in required_inputs(config.algorithm.adv_estimator)
        batch_rows = (config.data.gen_batch_size or config.data.train_batch_size) * self.n
        self.scorer = GroupScorer(rm_wg, reward_fn, client.submission, batch_rows)
        self.generated: list[float] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Prompts are sampled inside."""
        self.generated = []
        self.scorer.begin()
        async with self.client.running():
            yield self

    async def sample(self, prompt: DataProto, *, step: int, draw: int, number: int) -> DataProto:
        """The scored samples of one prompt; cancelling this call aborts their generation.

        The reward function's columns may differ between groups, see `concat_scored`.
        draw, number: index of the prompt batch within the step, and the prompt's row in it.
        """
        rows = partial(training_rows, self.config, prompt, step=step, draw=draw, first=number)
        if not self.needs_baselines:
            return await self._scored(rows(n=self.n))
        batch, baseline = await all_of([self._scored(rows(n=self.n)), self._scored(rows(n=1, greedy=True))])
        batch.tensors["reward_baselines"] = baseline.tensors["token_level_scores"].sum(-1).repeat_interleave(self.n)
        return batch

    async def _scored(self, rows: DataProto) -> DataProto:
        rows = rows.union(await self._responses(rows))
        self.generated.append(time.perf_counter())
        return await self.scorer.score(rows)

    async def _responses(self, rows: DataProto) -> DataProto:
        """What generation adds to the rows of one prompt."""
        rollout = self.config.actor_rollout_ref.rollout
        requests = requests_of(rows, sampling_params(rollout, validate=False, greedy=rows.meta_info["greedy"]))
        completions = await self._complete(requests, key=rows.non_tensor_batch["uid"][0])
        return batch_of(requests, completions, rollout, self.pad_token_id)

    async def _complete(self, requests: Sequence[GenerationRequest], key: str) -> list[Completion]:
        return await all_of([self.client.generate(request, key=key) for request in requests])


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls, in their order; if one fails, the others are cancelled and its exception is raised."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
