"""The audit `reward_probe`: a few responses of the first step are scored again now and then; the same response scores the same.

A reward that drifts (a rebuilt sandbox, a changed package, a function that keeps state) looks like learning in every curve.
"""

import logging
import time
from pathlib import Path

import torch

from lockstep.config.ensemble import reward_parts
from lockstep.config.placement import need_reward_model
from lockstep.config.ppo import PPOConfig
from lockstep.engines.train.micro_batch_limits import RandomState
from lockstep.protocol import DataProto
from lockstep.protocol.tokens import row_sums
from lockstep.rewards.calls import is_async
from lockstep.rewards.ensemble import Ensemble
from lockstep.rewards.errors import RewardError
from lockstep.rewards.managers import NaiveRewardManager
from lockstep.trainer.ppo.sampling import EXTRA_KEYS, RewardFn
from lockstep.utils.audit import Audits
from lockstep.utils.progress import phase
from lockstep.utils.state_file import encode, has_state, load_state, save_state

logger = logging.getLogger(__name__)

STATE = "reward_probe"
"""File of a checkpoint."""
NUM_ROWS = 4
EVERY = 50
"""Steps between two probes."""
MOST_SHARE, LEAST_S = 0.01, 0.5
"""Largest share of a step that a probe may take; seconds that it may always take."""
TENSORS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")


class RewardProbe:
    """
    reason: why there is no probe; None if there is one.
    scores: of the first two probes; more than their spread is drift.
    """

    def __init__(self, config: PPOConfig, reward_fn: RewardFn | None) -> None:
        self.reward_fn = reward_fn
        self.reason = why_not(config, reward_fn)
        self.rows: DataProto | None = None
        self.scores: list[list[float]] = []
        self._is_resumed = False

    def check(self, audits: Audits, batch: DataProto, step: int, step_s: float) -> None:
        """Score the probe, if it is time to: every `EVERY` steps, and in the first one after a resume.

        step_s: seconds of the step so far. A function that is slow in comparison is not probed.
        """
        if self.rows is None and self.reason is None:
            self._choose(batch)
        if self.rows is None:
            return
        try:
            if not self.scores:
                began = time.monotonic()
                first = self._score(self.rows)
                took_s = time.monotonic() - began
                if took_s > max(LEAST_S, MOST_SHARE * step_s):
                    self.rows = None
                    self._skip(f"the reward function takes {took_s:.1f} s for {len(first)} responses")
                    return
                self.scores = [first, self._score(self.rows)]
            elif step % EVERY == 0 or self._is_resumed:
                self._is_resumed = False
                self._compare(audits, self._score(self.rows))
        except RewardError as error:
            audits.found("reward_probe", f"responses of the first step can no longer be scored: {error}")

    def _compare(self, audits: Audits, scores: list[float]) -> None:
        first, second = self.scores
        spread = max(abs(a - b) for a, b in zip(first, second))
        drift = [abs(now - then) for now, then in zip(scores, first)]
        if max(drift) > 1e-6 + 3 * spread:
            row = drift.index(max(drift))
            audits.found(
                "reward_probe",
                f"a response of the first step scored {first[row]:.4g} then and {scores[row]:.4g} now; scored twice at once, its "
                f"scores differed by at most {spread:.2g}. The reward function has changed or keeps state, so rewards of "
                "different steps cannot be compared",
            )

    def _choose(self, batch: DataProto) -> None:
        """Take rows that are spread over the batch."""
        if "tool_call_counts" in batch.non_tensor_batch:
            self._skip("rewards of tools and environments are not computed again")
            return
        numbers = sorted({round(i * (len(batch) - 1) / max(NUM_ROWS - 1, 1)) for i in range(NUM_ROWS)})
        added = {*batch.meta_info.get(EXTRA_KEYS, ())}
        columns = [name for name in batch.non_tensor_batch if name not in added]
        names = [name for name in TENSORS if name in batch.tensors]
        rows = batch.select(names, columns, []).select_idxs(numbers)
        try:
            encode(rows.to_state(), owner="the reward probe")
        except ValueError as error:
            self._skip(str(error))
            return
        self.rows = rows

    def _skip(self, reason: str) -> None:
        self.reason = reason
        logger.debug("no reward probe: %s", reason)

    def _score(self, rows: DataProto) -> list[float]:
        assert self.reward_fn is not None
        scored = rows.select_idxs(list(range(len(rows))))  # what a function does to its batch stays there
        random_state = RandomState(torch.device("cpu"))
        try:
            with phase("rewards"):
                scores = self.reward_fn(scored, return_dict=True)["reward_tensor"]
        finally:
            random_state.restore()
        scored.tensors["token_level_scores"] = torch.as_tensor(scores)
        return [float(score) for score in row_sums(scored.tensors, "token_level_scores").tolist()]

    def save(self, folder: Path) -> None:
        """Write the probe into the folder of a checkpoint."""
        if self.rows is not None and self.reason is None:
            save_state(folder / STATE, {"rows": self.rows.to_state(), "scores": self.scores}, owner="the reward probe")

    def load(self, folder: Path) -> None:
        """Go on with the probe of a checkpoint, if it has one; it is scored in the next step."""
        if self.reason is None and has_state(folder / STATE):
            state = load_state(folder / STATE)
            self.rows, self.scores = DataProto.from_state(state["rows"]), state["scores"]
            self._is_resumed = True


def why_not(config: PPOConfig, reward_fn: RewardFn | None) -> str | None:
    """Why the reward of this run is not probed: it costs something, has side effects or is busy; None if it is probed."""
    reward = config.reward_model
    sources = [part.source for part in reward_parts(reward.ensemble).values()] if reward.ensemble else []
    if not isinstance(reward_fn, NaiveRewardManager):
        return "the reward manager is the user's own"
    if need_reward_model(config):
        return "a reward model scores"
    if reward.judge.enable or "judge" in sources:
        return "a judge scores"
    if reward.sandbox_fusion.url is not None:
        return "a SandboxFusion server scores"
    score = reward_fn.compute_score
    functions = [part.function for part in score.parts.values()] if isinstance(score, Ensemble) else [score]
    if any(function is not None and is_async(function) for function in functions):
        return "coroutine functions may call services"
    if config.trainer.async_mode is not None:
        return "the reward function is busy with samples of the background"
    return None
