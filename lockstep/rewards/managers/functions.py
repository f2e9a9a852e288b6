"""The reward manager of `RewardFunctions`: per-sample functions row by row, those with TRL's signature once per batch.

Each row's `extra_info` also has its prompt and its columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.protocol import DataProto
from lockstep.protocol.images import IMAGES
from lockstep.rewards.calls import Outcome, function_name, make_caller
from lockstep.rewards.ensemble import sum_of_turns
from lockstep.rewards.functions import RewardFunctions
from lockstep.rewards.managers.batch import score_batch
from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager, ScoringRow, score_of
from lockstep.rewards.rate_limit import RateLimiter

NOT_COLUMNS = {
    "raw_prompt",
    "raw_prompt_ids",
    IMAGES,
    "uid",
    "extra_info",
    "reward_model",
    "tools_kwargs",
    "interaction_kwargs",
}


@REWARD_MANAGERS.register("functions")
@dataclass(eq=False, repr=False)
class FunctionsRewardManager(NaiveRewardManager):
    """`timeout_s` limits the per-sample functions of one row, and each call for a batch."""

    max_concurrency: int = field(default=64, init=False)
    num_workers: int | None = field(default=None, init=False)
    limiter: RateLimiter | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.compute_score, RewardFunctions):
            raise ValueError(
                "reward_model.reward_manager=functions is for the functions passed to lockstep.train; set naive or batch"
            )
        self.functions = self.compute_score
        super().__post_init__()
        self.batch_callers = {
            name: (function_name(call), make_caller(call, self.timeout_s))
            for name, call in self.functions.per_batch().items()
        }
        self.scores_rows_alone = not self.batch_callers

    def _rows(self, data: DataProto) -> list[ScoringRow]:
        columns = {name: values for name, values in data.non_tensor_batch.items() if name not in NOT_COLUMNS}
        if "raw_prompt" in data.non_tensor_batch:
            columns["prompt"] = data.non_tensor_batch["raw_prompt"]
        return [
            replace(row, extra_info={name: values[i] for name, values in columns.items()} | row.extra_info)
            for i, row in enumerate(super()._rows(data))
        ]

    def _score_all(self, rows: list[ScoringRow]) -> list[Outcome]:
        of_rows = super()._score_all(rows)
        of_batch = {
            name: score_batch(caller, function, rows, lambda some: {"rows": [row.arguments() for row in some]})
            for name, (function, caller) in self.batch_callers.items()
        }
        return [
            own if isinstance(own, Exception) else self._combined(row, own | {n: of_batch[n][i] for n in of_batch})
            for i, (row, own) in enumerate(zip(rows, of_rows))
        ]

    def _combined(self, row: ScoringRow, results: Mapping[str, Outcome]) -> Outcome:
        """The weighted sum of the results by name, with what else they hold; the first exception if there is one."""
        combined: dict[str, Any] = {"score": 0.0}
        for name, (function, weight) in self.functions.by_name.items():
            result = results[name]
            if isinstance(result, Exception):
                return result
            own = dict(result) if isinstance(result, Mapping) else {"score": result}
            turns = own.pop("turn_rewards", None)
            own = own if turns is None else {"score": 0.0, **own}
            does_apply = "score" not in own or own["score"] is not None
            score = score_of(own, row, function) if does_apply else None
            combined |= {key: value for key, value in own.items() if key != "score"}
            combined["score"] += weight * (score or 0.0)
            if turns is not None:
                weighted = [weight * float(reward) for reward in turns]
                combined["turn_rewards"] = sum_of_turns(combined.get("turn_rewards"), weighted, f"reward {name}")
            if len(self.functions.by_name) > 1:
                combined[name] = score if turns is None else (score or 0.0) + sum(map(float, turns))
        return combined
