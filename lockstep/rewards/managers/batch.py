"""The batch reward manager: one call scores all rows, for functions that are faster on many texts at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.rewards.calls import Arguments, Caller, Outcome, function_name
from lockstep.rewards.custom import BATCH_ARGUMENTS, ComputeScore
from lockstep.rewards.default import default_compute_scores
from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager, ScoringRow
from lockstep.rewards.rate_limit import RateLimiter


@REWARD_MANAGERS.register("batch")
@dataclass(eq=False, repr=False)
class BatchRewardManager(NaiveRewardManager):
    """Calls `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs) -> list`.

    Each element is a number, a dict with `score`, or an exception for a row that failed. `timeout_s` limits the whole
    call. If the call raises or times out, rows are scored one by one, so that only the failing rows fail.
    """

    score_arguments: ClassVar[tuple[str, ...]] = BATCH_ARGUMENTS
    scores_rows_alone = False
    default_score: ClassVar[ComputeScore] = staticmethod(default_compute_scores)

    max_concurrency: int = field(default=64, init=False)
    num_workers: int | None = field(default=1, init=False)
    limiter: RateLimiter | None = field(default=None, init=False)

    def _score_all(self, rows: list[ScoringRow]) -> list[Outcome]:
        name = f"{function_name(self.compute_score)} (reward_model.reward_manager=batch)"
        return score_batch(self.call_all, name, rows, _columns)


def score_batch(
    caller: Caller, name: str, rows: list[ScoringRow], arguments: Callable[[list[ScoringRow]], Arguments]
) -> list[Outcome]:
    """One outcome per row, by one call. If it fails, by a call per row, so that only the failing rows fail.

    name: of the function, for messages. arguments: those of a call for these rows.
    """
    (outcome,) = caller([arguments(rows)])
    if not isinstance(outcome, Exception):
        return _scores(name, outcome, len(rows))
    if len(rows) == 1:
        return [outcome]
    alone = caller([arguments([row]) for row in rows])
    return [outcome if isinstance(outcome, Exception) else _scores(name, outcome, 1)[0] for outcome in alone]


def _columns(rows: list[ScoringRow]) -> Arguments:
    return dict(zip(BATCH_ARGUMENTS, map(list, zip(*(row.arguments().values() for row in rows)))))


def _scores(name: str, result: Any, num_rows: int) -> list[Outcome]:
    scores = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(scores, (list, tuple)) or len(scores) != num_rows:
        got = f"{len(scores)} scores" if isinstance(scores, (list, tuple)) else f"a {type(scores).__name__}"
        raise ValueError(
            f"the reward function {name} returned {got} for {num_rows} rows; it must return a list with one score per row"
        )
    return list(scores)
