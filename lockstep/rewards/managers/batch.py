"""The batch reward manager: one call scores all rows, for functions that are faster on many texts at once."""

from typing import Any, ClassVar

from lockstep.rewards.calls import Outcome, function_name
from lockstep.rewards.custom import BATCH_ARGUMENTS, ComputeScore
from lockstep.rewards.default import default_compute_scores
from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager, ScoringRow


@REWARD_MANAGERS.register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Calls `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs) -> list`.

    Each element is a number, a dict with `score`, or an exception for a row that failed. `timeout_s` limits the whole
    call. If the call raises or times out, rows are scored one by one, so that only the failing rows fail.
    """

    score_arguments: ClassVar[tuple[str, ...]] = BATCH_ARGUMENTS

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        timeout_s: float | None = None,
    ) -> None:
        score = compute_score or default_compute_scores
        super().__init__(tokenizer, num_examine, score, reward_fn_key, timeout_s, num_workers=1)

    def _score_all(self, rows: list[ScoringRow]) -> list[Outcome]:
        (outcomes,) = self._score_batches([rows])
        if not isinstance(outcomes, Exception):
            return outcomes
        if len(rows) == 1:
            return [outcomes]
        alone = self._score_batches([[row] for row in rows])
        return [outcome if isinstance(outcome, Exception) else outcome[0] for outcome in alone]

    def _score_batches(self, batches: list[list[ScoringRow]]) -> list[list[Outcome] | Exception]:
        """One call per batch; its scores, or why the call failed."""
        columns = [zip(*(row.arguments().values() for row in rows)) for rows in batches]
        results = self.call_all([dict(zip(BATCH_ARGUMENTS, map(list, values))) for values in columns])
        return [self._scores(rows, result) for rows, result in zip(batches, results)]

    def _scores(self, rows: list[ScoringRow], result: Outcome) -> list[Outcome] | Exception:
        if isinstance(result, Exception):
            return result
        scores = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(scores, (list, tuple)) or len(scores) != len(rows):
            got = f"{len(scores)} scores" if isinstance(scores, (list, tuple)) else f"a {type(scores).__name__}"
            raise ValueError(
                f"the reward function {function_name(self.compute_score)} returned {got} for {len(rows)} rows; "
                "reward_model.reward_manager=batch expects a list with one score per row"
            )
        return list(scores)
