"""The first two stages of a step as independent requests (`rollout.mode=async`): samples are scored as they are completed.

prompts ─► GroupSampler.respond, all at once ─► filter_groups ─► the groups of the step, in the order of their prompts

The batch is that of `Sampling`: the same rows, tokens and scores in the same order.
"""

import asyncio
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch

from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.agent_rollout import AgentRollout
from lockstep.trainer.ppo.group_sampler import GroupSampler
from lockstep.trainer.ppo.group_scorer import ScoredGroup
from lockstep.trainer.ppo.sampling import RewardFn, Sampling, concat_scored
from lockstep.utils import event_loop
from lockstep.utils.progress import count, phase
from lockstep.utils.spans import span
from lockstep.workers.rollout_client import RolloutClient

Place = tuple[int, int]
"""A prompt's batch within the step, and its row in that."""


class AsyncSampling(Sampling):
    """See `Sampling`, whose validation it shares. pad_token_id: that of the policy's tokenizer.

    With `rollout.over_sample_rate` a step ends before all of its prompts are complete, and the rest is aborted.
    """

    def __init__(
        self, config: PPOConfig, rollout_wg: Any, rm_wg: Any, reward_fn: RewardFn, *, pad_token_id: int
    ) -> None:
        super().__init__(config, rollout_wg, rm_wg, reward_fn)
        agents = rollout_wg.separate() if isinstance(rollout_wg, AgentRollout) else None
        client = RolloutClient(rollout_wg) if agents is None else agents.client
        self.submission = client.submission
        self.sampler = GroupSampler(config, client, rm_wg, reward_fn, pad_token_id, agents)
        self._in_order = config.actor_rollout_ref.rollout.over_sample_rate == 0

    def forget_failures(self) -> None:
        super().forget_failures()
        self.sampler.client.forget_failure()

    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        with span("gen"), phase("generate"):
            return event_loop.run(lambda: self._collect(prompts, step, timing))

    async def _collect(
        self, prompts: Iterator[DataProto], step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        began = time.perf_counter()
        async with self.sampler.running():
            groups, metrics = await self._groups(prompts, step)
            scored = time.perf_counter()
        batch = self._joined(groups)
        ended = time.perf_counter()
        generated = self.sampler.generated or [began]
        exposed_s = scored - generated[-1]
        timing["reward"] = timing.get("reward", 0.0) + exposed_s
        timing["gen"] = timing.get("gen", 0.0) + ended - began - exposed_s
        return batch, metrics | {
            "perf/rollout_first_group_s": generated[0] - began,
            "perf/rollout_half_groups_s": generated[(len(generated) - 1) // 2] - began,
            "perf/rollout_last_group_s": generated[-1] - began,
            "perf/reward_hidden_s": max(0.0, self.sampler.scorer.busy_s - exposed_s),
            "perf/reward_idle_fraction": max(0.0, 1 - self.sampler.scorer.busy_s / (scored - began)),
        }

    async def _groups(
        self, prompts: Iterator[DataProto], step: int
    ) -> tuple[dict[Place, ScoredGroup], dict[str, float]]:
        """The groups of the step, in the order of their prompts, and metrics.

        A further batch is drawn as soon as those at hand cannot suffice, and what cannot become part of the step is aborted.
        """
        num_draws = 0
        waiting: dict[asyncio.Task[ScoredGroup], Place] = {}
        finished: asyncio.Queue[asyncio.Task[ScoredGroup]] = asyncio.Queue()
        selection = Selection(self.config.data.train_batch_size, self._in_order)
        try:
            while (groups := selection.complete()) is None:
                if selection.num_kept + len(waiting) < selection.num_needed:
                    self.filter.check(num_draws, selection.num_kept)
                    batch = self.sampler.prepare(next(prompts), step=step, draw=num_draws)
                    for number in range(len(batch)):
                        task = asyncio.create_task(self.sampler.respond(batch, number))
                        task.add_done_callback(finished.put_nowait)
                        waiting[task] = num_draws, number
                        selection.ask(waiting[task])
                    num_draws += 1
                task = await finished.get()
                group = task.result()
                selection.add(waiting.pop(task), group if self.filter.keeps(group.rows()) else None)
                count(selection.num_finished, selection.num_finished + len(waiting), "prompts")
        finally:
            await event_loop.cancelled(list(waiting))
        metrics = self.filter.metrics(num_draws)
        if not self._in_order:
            metrics["train/num_unfinished_prompts"] = sum(task.cancelled() for task in waiting)
        return groups, metrics

    def _joined(self, groups: dict[Place, ScoredGroup]) -> DataProto:
        parts = [part for group in groups.values() for part in group.parts]
        calls = list({id(call): call for call, _ in parts}.values())
        first_rows = dict(zip(map(id, calls), accumulate(map(len, calls), initial=0)))
        order = [first_rows[id(call)] + row for call, rows in parts for row in range(rows.start, rows.stop)]
        batch = concat_scored(calls)[order]
        if self.needs_baselines:
            baselines = torch.tensor([group.baseline for group in groups.values()])
            batch.tensors["reward_baselines"] = baselines.repeat_interleave(self.n)
        return batch


class Selection:
    """Which groups make up the step.

    in_order: the first `num_needed` kept ones in the order of their prompts; else the first to finish.
    """

    def __init__(self, num_needed: int, in_order: bool = True) -> None:
        self.num_needed = num_needed
        self.num_finished = self.num_kept = 0
        self._in_order = in_order
        self._finished: dict[Place, ScoredGroup | None] = {}  # None if it was not kept
        self._asked: list[Place] = []
        self._decided: list[Place] = []  # the first of the asked ones, all finished

    def ask(self, place: Place) -> None:
        """Places come in their order."""
        self._asked.append(place)

    def add(self, place: Place, group: ScoredGroup | None) -> None:
        """group: None if it is not kept."""
        self.num_finished += 1
        self.num_kept += group is not None
        self._finished[place] = group

    def complete(self) -> dict[Place, ScoredGroup] | None:
        """The step's groups in the order of their prompts, if they are all there."""
        if self.num_kept < self.num_needed:
            return None
        kept = {place: group for place, group in self._finished.items() if group is not None}
        if not self._in_order:
            return {place: kept[place] for place in sorted(list(kept)[: self.num_needed])}
        while len(self._decided) < len(self._asked) and self._asked[len(self._decided)] in self._finished:
            place = self._asked[len(self._decided)]
            self._decided.append(place)
        chosen = [place for place in self._decided if place in kept][: self.num_needed]
        return {place: kept[place] for place in chosen} if len(chosen) == self.num_needed else None
