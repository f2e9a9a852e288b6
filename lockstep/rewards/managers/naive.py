"""The naive reward manager: calls one function per response and fills the (B, R) reward tensor.

DataProto --rows--> compute_score per row --check--> score at the last response token, other results by name
                                                   turn_rewards at the last token of each turn
"""

import logging
import math
import numbers
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import numpy as np
import torch

from lockstep.config import reward
from lockstep.protocol import DataProto
from lockstep.protocol.tokens import read, row_chunks, row_sums, shape_of, token_rows
from lockstep.registry import Registry
from lockstep.rewards.calls import Outcome, function_name, make_caller
from lockstep.rewards.custom import ARGUMENTS, ComputeScore
from lockstep.rewards.default import UnknownDataSourceError, default_compute_score
from lockstep.rewards.errors import AllRowsFailedError, RewardError
from lockstep.rewards.monitor import raised_at
from lockstep.rewards.rate_limit import RateLimiter
from lockstep.utils.decoding import decode_all
from lockstep.utils.untrusted import printable

logger = logging.getLogger(__name__)


class RewardResult(TypedDict):
    reward_tensor: torch.Tensor
    """(B, R) float32: the score at each response's last token, turn rewards at the last token of each turn, 0 elsewhere."""
    reward_extra_info: dict[str, list[Any]]
    """One value per row for each name; None if a row has none."""


RewardFn = Callable[..., Any]
"""`reward_fn(data: DataProto, return_dict=False) -> Tensor | RewardResult`."""

REWARD_MANAGERS: Registry[Callable[..., RewardFn]] = Registry(
    "reward manager", "reward_model.reward_manager", reward.REWARD_MANAGERS
)


ROLLOUT_COLUMNS = {
    "__num_turns__": "num_turns",
    "reward_scores": "rollout_reward_scores",
    "tool_rewards": "tool_rewards",
    "turn_scores": "turn_scores",
    "turn_rewards": "turn_rewards",
    "messages": "messages",
}
"""Columns of a multi-turn rollout, and their names in `extra_info`."""


@dataclass(frozen=True)
class ScoringRow:
    """One sample as the reward function gets it.

    num_tokens: length of the response, including tool tokens and EOS.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    num_tokens: int

    def arguments(self) -> dict[str, Any]:
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        return {name: getattr(self, name) for name in names}


@REWARD_MANAGERS.register("naive")
@dataclass(eq=False, repr=False)
class NaiveRewardManager:
    """Scores row by row with one function; coroutine functions run concurrently, `max_concurrency` at a time.

    If a call raises, kills its process twice or exceeds `timeout_s`, the sample scores 0 with `reward_failed` 1, and the
    first traceback is logged. If every row of a batch fails, calls only hang, no worker can be started, or a result is not a
    finite number, the run stops: a broken reward must not train silently. See `lockstep.rewards.calls` for where a function
    runs.

    num_examine: log this many samples of each data source.
    """

    score_arguments: ClassVar[tuple[str, ...]] = ARGUMENTS
    """Arguments of the reward function; its signature is checked at the start of a run."""
    always_workers: ClassVar[bool] = False
    default_score: ClassVar[ComputeScore] = staticmethod(default_compute_score)
    scores_rows_alone = True
    """Whether a batch can be scored in parts with all samples of a prompt, or with any samples unless `compares_samples`."""

    tokenizer: Any
    num_examine: int
    compute_score: ComputeScore | None = None
    reward_fn_key: str = "data_source"
    timeout_s: float | None = None
    max_concurrency: int = 64
    num_workers: int | None = None
    limiter: RateLimiter | None = None

    def __post_init__(self) -> None:
        score = self.compute_score = self.compute_score or self.default_score
        self.call_all = make_caller(
            score, self.timeout_s, self.num_workers, self.max_concurrency, self.always_workers, self.limiter
        )
        self._failure_logged = False
        self.compares_samples = getattr(self.compute_score, "compares_samples", False)
        self._reads_rm_scores = getattr(self.compute_score, "uses_reward_model", False)

    def close(self) -> None:
        """Stop the processes that call the function; the next call starts them again."""
        if hasattr(self.call_all, "close"):
            self.call_all.close()

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | RewardResult:
        assert data.batch is not None
        if "rm_scores" in data.batch.keys() and not self._reads_rm_scores:  # noqa: SIM118 (a TensorDict is not a mapping)
            result = RewardResult(reward_tensor=data.batch["rm_scores"], reward_extra_info={})
            return result if return_dict else result["reward_tensor"]
        rows = self._rows(data)
        scores, extra_info = self.score_rows(rows)
        turn_rewards = extra_info.pop("turn_rewards", None)
        self._log_examples(data, rows, scores)
        reward_tensor = place_scores(scores, last_token_positions(data), shape_of(data.batch, "responses")[1])
        if turn_rewards is not None:
            add_turn_rewards(reward_tensor, turn_rewards, turn_ends(data), function_name(self.compute_score))
        result = RewardResult(reward_tensor=reward_tensor, reward_extra_info=extra_info)
        return result if return_dict else reward_tensor

    def score_rows(self, rows: list[ScoringRow]) -> tuple[list[float], dict[str, list[Any]]]:
        """The score of each row, and the function's other results by name, with None for rows that have none.

        Scores are without `turn_rewards`, which are among the other results.
        """
        outcomes = self._score_all(rows)
        self._report_failures(rows, outcomes)
        scores, extra_info = self._read_outcomes(rows, outcomes)
        self._shape(rows, scores, extra_info)
        return scores, extra_info

    def _rows(self, data: DataProto) -> list[ScoringRow]:
        for name in (self.reward_fn_key, "reward_model"):
            if name not in data.non_tensor_batch:
                raise ValueError(
                    f"the batch has no {name!r}, which scoring needs; add that column to the data files "
                    "(data.reward_fn_key names the column that selects the scorer)"
                )
        sources, reward_models = data.non_tensor_batch[self.reward_fn_key], data.non_tensor_batch["reward_model"]
        extra_infos = data.non_tensor_batch.get("extra_info", [None] * len(data))
        wanted = ROLLOUT_COLUMNS | getattr(self.compute_score, "columns", {})
        added: dict[str, Any] = {
            name: data.non_tensor_batch[column] for column, name in wanted.items() if column in data.non_tensor_batch
        }
        assert data.batch is not None
        if self._reads_rm_scores:
            added["rm_score"] = row_sums(data.batch, "rm_scores").tolist()
        tokens = token_rows(data.batch, "responses")
        responses = self._texts(tokens)
        rows = []
        for row in range(len(data)):
            if "ground_truth" not in reward_models[row] and reward_models[row].get("style", "rule") == "rule":
                raise ValueError(f"row {row} of data_source {sources[row]!r} has no reward_model.ground_truth")
            rows.append(
                ScoringRow(
                    data_source=sources[row],
                    solution_str=responses[row],
                    ground_truth=reward_models[row].get("ground_truth"),
                    extra_info=dict(extra_infos[row] or {}) | {name: column[row] for name, column in added.items()},
                    num_tokens=len(tokens[row]),
                )
            )
        return rows

    def _texts(self, rows: list[torch.Tensor]) -> list[str]:
        return decode_all(self.tokenizer, [row.tolist() for row in rows])

    def _score_all(self, rows: list[ScoringRow]) -> list[Outcome]:
        """One outcome per row: the function's result, or an exception."""
        return self.call_all([row.arguments() for row in rows])

    def _report_failures(self, rows: list[ScoringRow], outcomes: list[Any]) -> None:
        failed = [row for row, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
        for row in failed:
            if isinstance(outcomes[row], (UnknownDataSourceError, RewardError)):  # not the fault of a sample
                raise outcomes[row]
        if not failed:
            return
        first = failed[0]
        function = function_name(self.compute_score)
        if len(failed) == len(rows):
            errors = dict(Counter(map(repr, outcomes)))
            where = raised_at(outcomes[first])
            raise AllRowsFailedError(function, rows[first].data_source, errors, where) from outcomes[first]
        # log the traceback only once, not on every step
        logger.warning(
            "the reward function %s failed on %d of %d samples, first on one of data_source %r; they score 0",
            *(function, len(failed), len(rows), rows[first].data_source),
            exc_info=None if self._failure_logged else outcomes[first],
        )
        self._failure_logged = True

    def _read_outcomes(self, rows: list[ScoringRow], outcomes: list[Any]) -> tuple[list[float], dict[str, list[Any]]]:
        scores: list[float] = []
        extra_info: dict[str, list[Any]] = {"reward_failed": [0.0] * len(rows)}
        for number, (row, outcome) in enumerate(zip(rows, outcomes)):
            if isinstance(outcome, Exception):
                scores.append(0.0)
                extra_info["reward_failed"][number] = 1.0
                continue
            result = outcome if isinstance(outcome, dict) else {"score": outcome}
            if result.get("turn_rewards") is not None:
                result = {"score": 0.0, **result}
            scores.append(score_of(result, row, self.compute_score))
            for name, value in result.items():
                if name != "score":
                    extra_info.setdefault(name, [None] * len(rows))[number] = value
        return scores, extra_info

    def _shape(self, rows: list[ScoringRow], scores: list[float], extra_info: dict[str, list[Any]]) -> None:
        """Hook for reward shaping; modifies `scores` and `extra_info` in place."""

    def _log_examples(self, data: DataProto, rows: list[ScoringRow], scores: list[float]) -> None:
        """Log the first `num_examine` samples of each data source."""
        if not self.num_examine:
            return
        shown: dict[str, int] = {}
        prompts = token_rows(data.tensors, "prompts")
        for number, (row, score) in enumerate(zip(rows, scores)):
            shown[row.data_source] = shown.get(row.data_source, 0) + 1
            if shown[row.data_source] <= self.num_examine:
                (prompt,) = self._texts([prompts[number]])
                logger.info(
                    "%s\n[prompt] %s\n[response] %s\n[ground truth] %s\n[score] %s",
                    printable(row.data_source),
                    printable(prompt),
                    printable(row.solution_str),
                    printable(str(row.ground_truth)),
                    score,
                )


def score_of(result: Mapping[str, Any], row: ScoringRow, function: ComputeScore | None) -> float:
    """The score in a function's result for `row`; ValueError if it has none or it is not a finite number."""
    score = result.get("score")
    if isinstance(score, np.generic) or (isinstance(score, torch.Tensor) and score.numel() == 1):
        score = score.item()
    if isinstance(score, numbers.Real) and math.isfinite(score):
        return float(score)
    wrong = f"the score {score!r}; it must be a finite number"
    if "score" not in result:
        wrong = f"a dict without 'score': {sorted(result)}"
    name = function_name(function)
    raise ValueError(f"the reward function {name} returned for data_source {row.data_source!r} {wrong}")


def last_token_positions(data: DataProto) -> list[int]:
    """Response index of each row's last policy token; 0 for an empty response."""
    assert data.batch is not None
    width = shape_of(data.batch, "responses")[1]
    name = "response_mask" if "response_mask" in data.batch.keys() else "attention_mask"  # noqa: SIM118
    places = torch.arange(width)
    masks = (read(part, name)[:, -width:].bool().cpu() for part in row_chunks(data.batch))
    return [place for mask in masks for place in (mask * places).amax(1).tolist()]


def turn_ends(data: DataProto) -> list[list[int]]:
    """Response indices of the last token of each turn of the policy: a turn is a run of 1 in `response_mask`."""
    found = []
    for part in row_chunks(data.tensors):
        mask = read(part, "response_mask").bool().cpu().numpy()
        is_end = mask & ~np.pad(mask, ((0, 0), (0, 1)))[:, 1:]
        found += [np.flatnonzero(row).tolist() for row in is_end]
    return found


def add_turn_rewards(
    rewards: torch.Tensor, turn_rewards: list[list[float] | None], ends: list[list[int]], function: str
) -> None:
    """Add each row's turn rewards to (B, R) `rewards`, at the end of their turns. function: its name, for messages."""
    for row, (values, places) in enumerate(zip(turn_rewards, ends)):
        if not values:
            continue
        if len(values) != len(places):
            raise ValueError(
                f"the reward function {function} returned {len(values)} turn_rewards for a response of {len(places)} turns; "
                "return one number per turn of the policy (assistant messages in extra_info['messages'])"
            )
        for place, value in zip(places, values):
            if not math.isfinite(value):
                raise ValueError(
                    f"the reward function {function} returned the turn reward {value!r}; it must be finite"
                )
            rewards[row, place] += float(value)


def place_scores(scores: list[float], positions: list[int], response_length: int) -> torch.Tensor:
    """(B, R) float32 with each row's score at its position."""
    rewards = np.zeros((len(scores), response_length), dtype=np.float32)
    with np.errstate(over="ignore"):  # overflow to inf is rejected by the trainer's audit
        rewards[np.arange(len(scores)), np.array(positions, dtype=np.int64)] = scores
    return torch.from_numpy(rewards)
