"""One prompt in, its n scored samples out, for many prompts at once: rewards are computed while others still generate.

prompts ─► PromptBatch ─► respond: n requests per prompt ─► RolloutClient ─► GroupScorer: rows with responses, token_level_scores

A sample is scored as soon as it is complete. If the reward compares samples, or there is a reward model, which computes batches,
the samples of a prompt are scored together.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch

from lockstep.algorithms.advantages import required_inputs
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto
from lockstep.protocol.generation import GenerationRequest
from lockstep.protocol.tokens import read
from lockstep.trainer.ppo.agent_rollout import AgentRollout, with_responses
from lockstep.trainer.ppo.group_scorer import GroupScorer, ScoredGroup
from lockstep.trainer.ppo.sampling import RewardFn, training_rows
from lockstep.utils.event_loop import all_of
from lockstep.workers.rollout_batch import batch_of, group_key, requests_of, sampling_params
from lockstep.workers.rollout_client import RolloutClient


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts of one batch, to be sampled together or one by one.

    rows, requests: `n` per prompt, in order; those of a group are at `places`.
    greedy:         the same prompts with one greedy row each, if the estimator needs their scores as baselines.
    """

    rows: DataProto
    requests: list[GenerationRequest]
    n: int
    greedy: "PromptBatch | None" = None

    def __len__(self) -> int:
        return len(self.requests) // self.n

    def places(self, number: int) -> range:
        return range(number * self.n, (number + 1) * self.n)


class GroupSampler:
    """Generates through `client` and scores as `Sampling` does: the same tokens, log-probs and scores for the same prompt.

    rm_wg:     None without a reward model.
    agents:    holds the conversations of the rows; None if all responses are single-turn.
    scores_samples: whether each sample is scored alone, else with the others of its prompt.
    num_generating: responses that are not complete.
    generated: when each group had all of its samples since `running` was entered, by `time.perf_counter`.
    """

    def __init__(
        self,
        config: PPOConfig,
        client: RolloutClient,
        rm_wg: Any,
        reward_fn: RewardFn,
        pad_token_id: int,
        agents: AgentRollout | None = None,
    ) -> None:
        self.config = config
        self.client = client
        self.agents = agents
        self.pad_token_id = pad_token_id
        self.n = config.actor_rollout_ref.rollout.n
        self.needs_baselines = "reward_baselines" in required_inputs(config.algorithm.adv_estimator)
        batch_rows = (config.data.gen_batch_size or config.data.train_batch_size) * self.n
        self.num_generating = 0
        self.scorer = GroupScorer(
            *(self._with_responses, rm_wg, reward_fn, client.submission, batch_rows), lambda: self.num_generating > 0
        )
        self.scores_samples = rm_wg is None and scores_samples_alone(reward_fn)
        self.generated: list[float] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Prompts are sampled inside."""
        self.generated = []
        self.num_generating = 0
        self.scorer.begin()
        async with self.client.running() if self.agents is None else self.agents.running():
            yield self
            await self.scorer.end()

    async def sample(self, prompt: DataProto, *, step: int, draw: int, number: int) -> DataProto:
        """The scored samples of one prompt; cancelling this call aborts their generation.

        The reward function's columns may differ between groups, see `concat_scored`.
        draw, number: index of the prompt batch within the step, and the prompt's row in it.
        """
        batch = self.prepare(prompt, step=step, draw=draw, first=number)
        group = await self.respond(batch, 0)
        rows = group.rows()
        if group.baseline is not None:
            rows.tensors["reward_baselines"] = torch.full((len(rows),), group.baseline)
        return rows

    def prepare(self, prompts: DataProto, *, step: int, draw: int, first: int = 0) -> PromptBatch:
        """draw, first: index of the prompt batch within the step, and the row in it of the first of `prompts`."""

        def make(n: int, *, greedy: bool, baselines: PromptBatch | None = None) -> PromptBatch:
            rows = training_rows(self.config, prompts, n=n, step=step, draw=draw, first=first, greedy=greedy)
            sampling = sampling_params(self.config.actor_rollout_ref.rollout, validate=False, greedy=greedy)
            return PromptBatch(rows, requests_of(rows, sampling), n, baselines)

        baselines = make(1, greedy=True) if self.needs_baselines else None
        return make(self.n, greedy=False, baselines=baselines)

    async def respond(self, batch: PromptBatch, number: int) -> ScoredGroup:
        """The scored samples of one prompt of the batch."""
        if batch.greedy is None:
            return await self._respond(batch, number)
        group, greedy = await all_of([self._respond(batch, number), self._respond(batch.greedy, number)])
        group.baseline = float(read(greedy.rows().tensors, "token_level_scores").sum())
        return group

    async def _respond(self, batch: PromptBatch, number: int) -> ScoredGroup:
        places = batch.places(number)
        num_left = len(places)

        async def response(place: int) -> Any:
            nonlocal num_left
            self.num_generating += 1
            try:
                found = await self._response(batch, place)
            finally:
                self.num_generating -= 1
            num_left -= 1
            if num_left == 0:
                self.generated.append(time.perf_counter())
            return found

        async def scored(place: int) -> ScoredGroup:
            return await self.scorer.score(batch, [place], [await response(place)])

        if self.scores_samples:
            return ScoredGroup.joined(await all_of([scored(place) for place in places]))
        return await self.scorer.score(batch, places, await all_of([response(place) for place in places]))

    async def _response(self, batch: PromptBatch, place: int) -> Any:
        """A completion, or the conversation of an agent."""
        request = batch.requests[place]
        if self.agents is not None:
            return await self.agents.converse(batch.rows, place, request)
        return await self.client.generate(request, key=group_key(batch.rows, place))

    def _with_responses(self, batch: PromptBatch, places: Sequence[int], responses: Sequence[Any]) -> DataProto:
        """Rows of a batch with the responses to them: completions, or conversations of agents."""
        if self.agents is not None:
            rows = batch.rows[places]
            return with_responses(rows, self.agents.batch(responses, rows))
        requests = [batch.requests[place] for place in places]
        rollout = self.config.actor_rollout_ref.rollout
        return batch.rows[places].union(batch_of(requests, responses, rollout, self.pad_token_id))


def scores_samples_alone(reward_fn: RewardFn) -> bool:
    """Whether a sample's score does not depend on the other samples of its prompt."""
    return getattr(reward_fn, "scores_rows_alone", False) and not getattr(reward_fn, "compares_samples", False)
