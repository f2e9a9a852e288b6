"""The first two stages of a step as independent requests (`rollout.mode=async`): groups are scored as they are completed.

prompts ─► GroupSampler.sample, all at once ─► filter_groups ─► the groups of the step, in the order of their prompts

The batch is that of `Sampling`: the same rows, tokens and scores in the same order.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar

import torch

from lockstep.algorithms.filtering import keep_informative_groups
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.group_sampler import GroupSampler
from lockstep.trainer.ppo.group_scorer import ScoredGroup
from lockstep.trainer.ppo.sampling import RewardFn, Sampling, concat_scored
from lockstep.utils.progress import count, phase
from lockstep.utils.spans import span
from lockstep.workers.rollout_client import RolloutClient

T = TypeVar("T")

Place = tuple[int, int]
"""Of a prompt: its batch within the step, and its row in that."""


class AsyncSampling(Sampling):
    """See `Sampling`, whose validation it shares. pad_token_id: that of the policy's tokenizer."""

    def __init__(
        self, config: PPOConfig, rollout_wg: Any, rm_wg: Any, reward_fn: RewardFn, *, pad_token_id: int
    ) -> None:
        super().__init__(config, rollout_wg, rm_wg, reward_fn)
        self.sampler = GroupSampler(config, RolloutClient(rollout_wg), rm_wg, reward_fn, pad_token_id)

    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        with span("gen"), phase("generate"):
            return run(self._collect(prompts, step, timing))

    async def _collect(
        self, prompts: Iterator[DataProto], step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        began = time.perf_counter()
        async with self.sampler.running():
            groups, draws = await self._groups(prompts, step)
            scored = time.perf_counter()
        batch = self._joined(groups)
        ended, generated = time.perf_counter(), self.sampler.generated
        timing["reward"] = timing.get("reward", 0.0) + scored - generated[-1]
        timing["gen"] = timing.get("gen", 0.0) + ended - began - (scored - generated[-1])
        metrics = {
            "perf/rollout_first_group_s": generated[0] - began,
            "perf/rollout_half_groups_s": generated[(len(generated) - 1) // 2] - began,
            "perf/rollout_last_group_s": generated[-1] - began,
            "perf/reward_idle_fraction": 1 - self.sampler.scorer.busy_s / (scored - began),
        }
        return batch, metrics | ({"train/num_gen_batches": draws} if self.config.algorithm.filter_groups.enable else {})

    async def _groups(self, prompts: Iterator[DataProto], step: int) -> tuple[list[ScoredGroup], int]:
        """The groups of the step and how many batches of prompts were drawn.

        A further batch is drawn as soon as those at hand cannot suffice, and what cannot become part of the step is aborted.
        """
        draws = 0
        tasks: dict[asyncio.Task[ScoredGroup], Place] = {}
        finished: asyncio.Queue[asyncio.Task[ScoredGroup]] = asyncio.Queue()
        selection = Selection(self.config.data.train_batch_size)
        kept_rows: dict[int, set[int]] = {}  # by id of the call
        try:
            while (groups := selection.complete()) is None:
                if selection.num_kept + len(tasks) < selection.num_needed:
                    if draws:
                        self._check_draws(draws, selection.num_kept)
                    draw = self.sampler.draw(next(prompts), step=step, draw=draws)
                    for number in range(len(draw)):
                        task = asyncio.create_task(self.sampler.respond(draw, number))
                        task.add_done_callback(finished.put_nowait)
                        tasks[task] = draws, number
                        selection.ask(tasks[task])
                    draws += 1
                task = await finished.get()
                group = task.result()
                if id(group.call) not in kept_rows:
                    kept_rows[id(group.call)] = self._kept_rows(group.call)
                is_kept = group.rows.start in kept_rows[id(group.call)]
                selection.add(tasks.pop(task), group if is_kept else None)
                count(selection.num_finished, selection.num_finished + len(tasks), "prompts")
        finally:
            for task in tasks:
                task.cancel()
        return groups, draws

    def _kept_rows(self, call: DataProto) -> set[int]:
        """The rows of the groups that may be trained on."""
        rule = self.config.algorithm.filter_groups
        if not rule.enable:
            return set(range(len(call)))
        if all(call.non_tensor_batch.get("reward_failed", [False])):  # it has none of the function's columns
            return set(range(len(call))) if self.n == 1 else set()
        return set(keep_informative_groups(concat_scored([call]), rule.metric))

    def _joined(self, groups: list[ScoredGroup]) -> DataProto:
        calls = list({id(group.call): group.call for group in groups}.values())
        first_rows = dict(zip(map(id, calls), accumulate(map(len, calls), initial=0)))
        order = [
            first_rows[id(group.call)] + row for group in groups for row in range(group.rows.start, group.rows.stop)
        ]
        batch = concat_scored(calls)[order]
        if self.needs_baselines:
            batch.tensors["reward_baselines"] = torch.tensor([g.baseline for g in groups]).repeat_interleave(self.n)
        return batch


class Selection:
    """Which groups make up the step: the first `num_needed` kept ones, in the order of their prompts."""

    def __init__(self, num_needed: int) -> None:
        self.num_needed = num_needed
        self.num_finished = self.num_kept = 0
        self._groups: dict[Place, ScoredGroup | None] = {}  # finished ones; None if it was not kept
        self._asked: list[Place] = []
        self._num_decided = 0  # of the asked ones, in order
        self._chosen: list[ScoredGroup] = []

    def ask(self, place: Place) -> None:
        """Places come in their order."""
        self._asked.append(place)

    def add(self, place: Place, group: ScoredGroup | None) -> None:
        """group: None if it is not kept."""
        self.num_finished += 1
        self.num_kept += group is not None
        self._groups[place] = group
        while len(self._chosen) < self.num_needed and self._num_decided < len(self._asked):
            if (first := self._asked[self._num_decided]) not in self._groups:
                return
            self._num_decided += 1
            if (chosen := self._groups.pop(first)) is not None:
                self._chosen.append(chosen)

    def complete(self) -> list[ScoredGroup] | None:
        """The step's groups, if they are all there."""
        return self._chosen if len(self._chosen) == self.num_needed else None


def run(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also if this thread already runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()
