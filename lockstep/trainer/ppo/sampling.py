"""The first two stages of a step: generate samples for a batch of prompts, and score them.

prompts ─► n rows each, with uid and seed ─► generate ─► reward model ─► reward function ─► token_level_scores
"""

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from lockstep.algorithms.advantages import required_inputs
from lockstep.algorithms.filtering import keep_informative_groups
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.images import IMAGES
from lockstep.protocol.tokens import pack, row_sums, shape_of, without_empty_images
from lockstep.rewards.errors import AllRowsFailedError
from lockstep.trainer.ppo.agent_rollout import AgentRollout, with_responses
from lockstep.trainer.ppo.metrics import is_numeric
from lockstep.utils.progress import phase
from lockstep.utils.timing import marked_timer

logger = logging.getLogger(__name__)

RewardFn = Callable[..., Any]
"""(batch, return_dict=True) -> {"reward_tensor": (B, R), "reward_extra_info": {name: list}}."""

EXTRA_KEYS = "reward_extra_keys"
"""meta_info key: names of the columns added by the reward function."""
MIN_SLOW_S = 1.0
SLOW_SHARE = 0.2
"""Rewards are slow if they take more seconds than this, and this share of generation."""


class Sampling:
    """Generates and scores through worker groups.

    rm_wg:     None without a reward model.
    reward_fn: scores training samples; validation passes its own.
    """

    submission: AbstractContextManager[Any] = nullcontext()
    """See `with_scores`."""

    def __init__(self, config: PPOConfig, rollout_wg: Any, rm_wg: Any, reward_fn: RewardFn) -> None:
        self.config = config
        self.rollout_wg = rollout_wg
        self.rm_wg = rm_wg
        self.reward_fn = reward_fn
        self.n = config.actor_rollout_ref.rollout.n
        self.filter = GroupFilter(config)
        self._has_suggested = False
        self.needs_baselines = "reward_baselines" in required_inputs(config.algorithm.adv_estimator)

    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        """The scored samples of a step, and metrics.

        With `algorithm.filter_groups`, generates batches of prompts until `data.train_batch_size` prompts have samples with
        different scores.
        """
        if not self.filter.enable:
            return self.scored(next_batch(prompts), step=step, draw=0, timing=timing), {}
        num_rows = self.config.data.train_batch_size * self.n
        kept: list[DataProto] = []
        while (num_kept := sum(map(len, kept))) < num_rows:
            self.filter.check(len(kept), num_kept // self.n)
            batch = self.scored(next_batch(prompts), step=step, draw=len(kept), timing=timing)
            kept.append(batch[self.filter.rows(batch)])
        return concat_scored(kept)[:num_rows], self.filter.metrics(len(kept))

    def scored(self, prompts: DataProto, *, step: int, draw: int, timing: dict[str, float]) -> DataProto:
        """Scored samples of one batch of prompts, with greedy baselines if the estimator needs them."""
        with marked_timer("gen", timing):
            batch = self.generate(prompts, n=self.n, step=step, draw=draw)
        with marked_timer("reward", timing):
            batch = self.score(batch, self.reward_fn)
        self._suggest_async(timing["gen"], timing["reward"])
        if self.needs_baselines:
            with marked_timer("gen_max", timing):
                batch.tensors["reward_baselines"] = self.greedy_baselines(prompts, step=step, draw=draw)
        return batch

    def _suggest_async(self, gen_s: float, reward_s: float) -> None:
        """Log once that rewards could be computed during generation, if they take much of the step."""
        could_overlap = getattr(self.reward_fn, "scores_rows_alone", False)
        if not self._has_suggested and could_overlap and reward_s > max(MIN_SLOW_S, SLOW_SHARE * gen_s):
            self._has_suggested = True
            logger.info(
                "rewards took %.1f s after %.1f s of generation; actor_rollout_ref.rollout.mode=async computes them while others "
                "are generated, with the same results",
                *(reward_s, gen_s),
            )

    def forget_failures(self) -> None:
        """The rollout was repaired."""
        if isinstance(self.rollout_wg, AgentRollout):
            self.rollout_wg.client.forget_failure()

    def generate(self, prompts: DataProto, *, n: int, step: int, draw: int = 0, greedy: bool = False) -> DataProto:
        """`n` responses per prompt; see `training_rows`."""
        rows = training_rows(self.config, prompts, n=n, step=step, draw=draw, greedy=greedy)
        return _generate(self.rollout_wg, rows)

    def generate_for_validation(self, prompts: DataProto, rows: Sequence[int], *, step: int) -> DataProto:
        """`rollout.val_kwargs.n` responses per prompt. rows: see `generate_for_rows`."""
        rollout = self.config.actor_rollout_ref.rollout
        return generate_for_rows(self.rollout_wg, prompts, rows, n=rollout.val_kwargs.n, seed=rollout.seed, step=step)

    def score(self, batch: DataProto, reward_fn: RewardFn) -> DataProto:
        """Write `token_level_scores` and the extra columns of the reward function."""
        return _with_failed_filled(with_scores(batch, self.rm_wg, reward_fn, self.submission))

    def greedy_baselines(self, prompts: DataProto, *, step: int, draw: int) -> torch.Tensor:
        """(B * n) score of each prompt's greedy response."""
        greedy = self.generate(prompts, n=1, step=step, draw=draw, greedy=True)
        scores = row_sums(self.score(greedy, self.reward_fn).tensors, "token_level_scores")
        return scores.repeat_interleave(self.n)


class GroupFilter:
    """`algorithm.filter_groups`: which prompts are trained on, and how many batches of prompts a step may draw to find them."""

    def __init__(self, config: PPOConfig) -> None:
        rule = config.algorithm.filter_groups
        self.enable = rule.enable
        self.metric = rule.metric
        self.max_draws = rule.max_num_gen_batches
        self.num_prompts = config.data.train_batch_size

    def rows(self, batch: DataProto) -> list[int]:
        """The rows of the groups that are kept, in order."""
        return keep_informative_groups(batch, self.metric)

    def keeps(self, samples: DataProto) -> bool:
        """Whether the samples of one prompt are kept."""
        if not self.enable:
            return True
        if all(samples.non_tensor_batch.get("reward_failed", [False])):  # they may have none of the function's columns
            return len(samples) == 1
        return bool(self.rows(concat_scored([samples])))

    def check(self, num_draws: int, num_kept: int) -> None:
        """Before a batch of prompts is drawn: ValueError if there may be no further one; warn after the 8th, 16th, 32nd …"""
        if 0 < self.max_draws <= num_draws:
            raise ValueError(
                f"algorithm.filter_groups.max_num_gen_batches={self.max_draws}: only {num_kept} of {self.num_prompts} prompts "
                "have samples with different scores; the prompts are too hard or too easy for the policy"
            )
        if num_draws >= 8 and num_draws.bit_count() == 1:
            logger.warning(
                "filter_groups: %d batches sampled, %d of %d prompts kept: most prompts are too hard or too easy; set "
                "algorithm.filter_groups.max_num_gen_batches to limit the number of batches",
                *(num_draws, num_kept, self.num_prompts),
            )

    def check_dropped(self, num_dropped: int) -> None:
        """Before a batch of prompts is drawn in the background. num_dropped: prompts that were not kept during the step."""
        if self.enable and 0 < self.max_draws * self.num_prompts <= num_dropped:
            raise ValueError(
                f"algorithm.filter_groups.max_num_gen_batches={self.max_draws}: the samples of {num_dropped} "
                "prompts had equal scores in one step; the prompts are too hard or too easy for the policy"
            )

    def metrics(self, num_draws: int) -> dict[str, float]:
        return {"train/num_gen_batches": num_draws} if self.enable else {}


def next_batch(batches: Iterator[DataProto]) -> DataProto:
    with phase("read a batch"):
        return next(batches)


class FailureLimit:
    """A reward function whose calls may fail on all of their rows.

    These rows score 0, with a warning; `max_rows` of them without a scored row in between stop the run.
    """

    def __init__(self, reward_fn: RewardFn, max_rows: int) -> None:
        self.reward_fn = reward_fn
        self.max_rows = max_rows
        self._traceback_logged = False
        self.reset()

    def reset(self) -> None:
        self._failures: list[AllRowsFailedError] = []

    def __call__(self, batch: DataProto, return_dict: bool = True) -> Any:
        try:
            result = self.reward_fn(batch, return_dict=True)
        except AllRowsFailedError as error:
            self._failures.append(error)
            if sum(failure.num_rows for failure in self._failures) >= self.max_rows:
                raise AllRowsFailedError.of_calls(self._failures) from error.__cause__
            traceback = None if self._traceback_logged else error.__cause__
            logger.warning("%s; these samples score 0", error.what, exc_info=traceback)
            self._traceback_logged = True
            scores = torch.zeros(shape_of(batch.tensors, "responses"), dtype=torch.float32)
            return {"reward_tensor": scores, "reward_extra_info": {"reward_failed": [1.0] * len(batch)}}
        self.reset()
        return result


def generate_for_rows(
    rollout_wg: Any, prompts: DataProto, rows: Sequence[int], *, n: int, seed: int, step: int = 0
) -> DataProto:
    """`n` responses per prompt with the sampling of `rollout.val_kwargs`, as in validation and `lockstep generate`.

    rows: number of each prompt in its data. A sample's random stream depends only on (seed, row, number of the sample): not on
    the step, the batch size, or what was generated before.
    """
    words = [
        np.random.SeedSequence([seed, row, 0, 1]).generate_state(n, np.uint64) for row in rows
    ]  # training has a 0 last
    uids = [str(row) for row in rows]
    return _generate(rollout_wg, _sample_rows(prompts, uids, np.concatenate(words), step=step, validate=True))


def _generate(rollout_wg: Any, rows: DataProto) -> DataProto:
    """The rows with their responses."""
    names = [name for name in ("raw_prompt_ids", IMAGES) if name in rows.non_tensor_batch]
    inputs = rows if isinstance(rollout_wg, AgentRollout) else rows.select(["sampling_seed"], names)
    with phase("generate"):
        return with_responses(rows, rollout_wg.generate_sequences(inputs))


def training_rows(
    config: PPOConfig, prompts: DataProto, *, n: int, step: int, draw: int, first: int = 0, greedy: bool = False
) -> DataProto:
    """`n` rows per prompt, with uid and seed; rows of one prompt share a uid.

    draw:  index of the prompt batch within the step. A sample's random stream depends only on (rollout.seed, step, draw,
           row), not on how rows are distributed or on what ran before.
    first: row of the first prompt in that batch.
    """
    words = np.random.SeedSequence([config.actor_rollout_ref.rollout.seed, step, draw, 0])
    seeds = words.generate_state((first + len(prompts)) * n, np.uint64)[first * n :]
    uids = [_uid(draw, number) for number in range(first, first + len(prompts))]
    return _sample_rows(prompts, uids, seeds, step=step, greedy=greedy)


def _sample_rows(
    prompts: DataProto,
    uids: Sequence[str],
    seeds: np.ndarray,
    *,
    step: int,
    validate: bool = False,
    greedy: bool = False,
) -> DataProto:
    """One row per seed, as many for each prompt; `seeds` are uint64, in the order of the prompts."""
    n = len(seeds) // len(prompts)
    batch = prompts.repeat(repeat_times=n, interleave=True)
    batch.non_tensor_batch["uid"] = object_array(list(uids)).repeat(n)
    batch = batch.union(DataProto.from_dict(tensors={"sampling_seed": torch.from_numpy((seeds >> 1).astype(np.int64))}))
    batch.meta_info |= {"validate": validate, "greedy": greedy, "global_steps": step}
    return batch


def _uid(draw: int, number: int) -> str:
    """Id of a prompt in a step; unique per prompt and draw."""
    return str(uuid.UUID(int=(draw << 64) + number))


def extra_metrics(batch: DataProto) -> dict[str, float]:
    """Means of the reward function's numeric columns, as `reward/{name}/mean`."""
    columns = {name: values for name, values in extra_columns(batch).items() if is_numeric(values)}
    return {f"reward/{name}/mean": float(np.mean([v for v in vs if v is not None])) for name, vs in columns.items()}


def fill_failed(extra_info: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The reward function's columns; numeric ones are 0 for the rows whose scoring failed."""
    filled = {}
    for name, values in extra_info.items():
        failed = extra_info.get("reward_failed", [0.0] * len(values))
        rows = zip(values, failed)
        filled[name] = [0.0 if v is None and fail else v for v, fail in rows] if is_numeric(values) else values
    return filled


def with_scores(
    batch: DataProto, rm_wg: Any, reward_fn: RewardFn, submission: AbstractContextManager[Any]
) -> DataProto:
    """The rows with the reward model's scores, if there is one, and the result of the reward function: `token_level_scores` and
    its columns, with None for rows without a value.

    submission: held while the reward model is called, so that all ranks get the calls of several threads in the same order.
    """
    if rm_wg is not None:
        with phase("reward model"):
            with submission:
                scores = rm_wg.compute_rm_score(without_empty_images(batch))
            batch = batch.union(scores.get())
    with phase("rewards"):
        result = reward_fn(batch, return_dict=True)
    extra = result["reward_extra_info"]
    batch.tensors["token_level_scores"] = result["reward_tensor"]
    batch.non_tensor_batch |= {name: object_array(values) for name, values in extra.items()}
    batch.meta_info[EXTRA_KEYS] = sorted(extra)
    return pack(batch)


def _with_failed_filled(batch: DataProto) -> DataProto:
    batch.non_tensor_batch |= {n: object_array(values) for n, values in fill_failed(extra_columns(batch)).items()}
    return batch


def concat_scored(parts: list[DataProto]) -> DataProto:
    """`concat_unfilled`, with 0 for failed rows in numeric reward columns."""
    return _with_failed_filled(concat_unfilled(parts))


def concat_unfilled(parts: list[DataProto]) -> DataProto:
    """The parts as one batch; a reward column that some parts lack is None there."""
    names = sorted({name for part in parts for name in part.meta_info[EXTRA_KEYS]})
    for part in parts:
        part.meta_info[EXTRA_KEYS] = names
        for name in names:
            part.non_tensor_batch.setdefault(name, object_array([None] * len(part)))
    return DataProto.concat(parts)


def extra_columns(batch: DataProto) -> dict[str, list[Any]]:
    """The columns added by the reward function."""
    return {name: list(batch.non_tensor_batch[name]) for name in batch.meta_info[EXTRA_KEYS]}
