"""Several rewards with weights (`reward_model.ensemble`): the score of a row is their weighted sum.

rows ─► each part's caller, all at once ─► value per part ─► clip, normalize ─► weighted sum; each value is a column
"""

import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lockstep.config.ensemble import ENSEMBLE_KEY
from lockstep.config.reward import RewardPartConfig
from lockstep.rewards.scorers.environment_reward import conversation_reward
from lockstep.utils.progress import phase

Row = Mapping[str, Any]
"""The arguments of `compute_score`."""
Result = dict[str, Any]
"""`score`, or `turn_rewards`, or both; and further values by name."""


@dataclass(frozen=True)
class Part:
    """
    function:  `compute_score(data_source, solution_str, ground_truth, extra_info)`.
    is_column: it only reads a column, so it is called directly.
    """

    config: RewardPartConfig
    function: Callable[..., Any]
    is_column: bool = False


class Ensemble:
    """
    parts:         by name, in the order of the config; without those of weight 0.
    label:         its name in messages.
    compares_samples: whether a score depends on the other samples of the prompt.
    is_normalized: apply `normalize`; not in validation, where a prompt may have one sample.
    """

    def __init__(self, parts: Mapping[str, Part], is_normalized: bool) -> None:
        self.parts = dict(parts)
        self.is_normalized = is_normalized
        self.uses_reward_model = any(part.config.source == "reward_model" for part in self.parts.values())
        self.columns = {"uid": "uid"} if any(part.config.normalize for part in self.parts.values()) else {}
        self.compares_samples = is_normalized and bool(self.columns)
        for part in self.parts.values():
            self.columns |= getattr(part.function, "columns", {})
        self.label = f"{ENSEMBLE_KEY} ({' + '.join(self.parts)})"

    def caller(self, make: Callable[[Callable[..., Any]], Callable[[list[Any]], list[Any]]]) -> "EnsembleCaller":
        """make: how a part's function is called on many rows."""
        calls = {
            name: functools.partial(_call_inline, part.function) if part.is_column else make(part.function)
            for name, part in self.parts.items()
        }
        return EnsembleCaller(self, calls)


class EnsembleCaller:
    def __init__(self, ensemble: Ensemble, calls: Mapping[str, Callable[[list[Any]], list[Any]]]) -> None:
        self.ensemble = ensemble
        self.calls = calls

    def close(self) -> None:
        for call in self.calls.values():
            if hasattr(call, "close"):
                call.close()

    def __call__(self, rows: list[Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.calls), thread_name_prefix="rewards") as threads:
            futures = {name: threads.submit(_call_part, name, call, rows) for name, call in self.calls.items()}
        outcomes = {name: future.result() for name, future in futures.items()}
        failed = [
            next((of[i] for of in outcomes.values() if isinstance(of[i], Exception)), None) for i in range(len(rows))
        ]
        kept = [i for i, failure in enumerate(failed) if failure is None]
        sizes = Counter(row["extra_info"].get("uid") for row in rows)
        weighted = {
            name: self._weighted(
                name, [rows[i] for i in kept], [as_result(name, outcomes[name][i]) for i in kept], sizes
            )
            for name in self.calls
        }
        combined: list[Any] = list(failed)
        for number, i in enumerate(kept):
            combined[i] = _combined({name: values[number] for name, values in weighted.items()})
        return combined

    def _weighted(
        self, name: str, rows: Sequence[Row], results: Sequence[Result], sizes: Mapping[Any, int]
    ) -> list[tuple[Result, Result]]:
        """For each row, what the part adds to the score, and what it adds to the columns.

        sizes: number of samples by uid, with those that failed.
        """
        config = self.ensemble.parts[name].config
        values = [_value(result) for result in results]
        shaped = list(values)
        if config.clip is not None:
            low, high = config.clip
            shaped = [None if value is None else min(max(value, low), high) for value in shaped]
        if config.normalize == "group" and self.ensemble.is_normalized:
            shaped = within_groups(shaped, [row["extra_info"]["uid"] for row in rows], sizes)
        is_shaped = config.clip is not None or config.normalize is not None
        added = []
        for result, value, new in zip(results, values, shaped):
            turns = result.get("turn_rewards")
            if turns is not None and is_shaped:
                raise ValueError(
                    f"{ENSEMBLE_KEY}.{name}: it returned turn_rewards; clip and normalize do not apply to them"
                )
            score = new if is_shaped else result.get("score")
            columns = {key: item for key, item in result.items() if key not in ("score", "turn_rewards")}
            own: Result = {"score": config.weight * float(score or 0.0)}
            if turns is not None:
                own["turn_rewards"] = [config.weight * float(reward) for reward in turns]
            added.append((own, {name: value} | columns))
        return added


def _combined(parts: Mapping[str, tuple[Result, Result]]) -> Result:
    total: Result = {"score": 0.0}
    for name, (own, columns) in parts.items():
        total["score"] += own["score"]
        if "turn_rewards" in own:
            where = f"{ENSEMBLE_KEY}.{name}"
            total["turn_rewards"] = sum_of_turns(total.get("turn_rewards"), own["turn_rewards"], where)
        for key, value in columns.items():
            total[f"{name}/{key}" if key in total else key] = value
    return total


def sum_of_turns(total: list[float] | None, rewards: list[float], where: str) -> list[float]:
    """The sum for each turn. where: the second reward, for messages."""
    if total is None:
        return rewards
    if len(total) != len(rewards):
        raise ValueError(f"{where}: {len(rewards)} turn_rewards; another reward has {len(total)} for this row")
    return [a + b for a, b in zip(total, rewards)]


def as_result(name: str, outcome: Any) -> Result:
    """A part's result as a dict; ValueError if it has no number."""
    result = dict(outcome) if isinstance(outcome, Mapping) else {"score": outcome}
    if "score" not in result and "turn_rewards" not in result:
        raise ValueError(f"{ENSEMBLE_KEY}.{name}: it returned a dict without 'score': {sorted(result)}")
    numbers = [result["score"]] if result.get("score") is not None else []
    for number in (*numbers, *(result.get("turn_rewards") or ())):
        if isinstance(number, str) or not math.isfinite(number):
            raise ValueError(f"{ENSEMBLE_KEY}.{name}: it returned {number!r}; it must be a finite number")
    return result


def _value(result: Result) -> float | None:
    """The part's reward for the row, turns included; None if the part does not apply to it."""
    score, turns = result.get("score"), result.get("turn_rewards")
    if score is None and turns is None:
        return None
    return float(score or 0.0) + sum(map(float, turns or ()))


def within_groups(values: Sequence[float | None], uids: Sequence[str], sizes: Mapping[Any, int]) -> list[float | None]:
    """(value - mean) / std of the samples of the same prompt; 0 if they are equal, or if the others have no value.

    The only sample of a prompt keeps its value. sizes: number of samples by uid.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for value, uid in zip(values, uids):
        if value is not None:
            groups[uid].append(value)
    return [
        value if value is None or sizes[uid] == 1 else _standardized(value, groups[uid])
        for value, uid in zip(values, uids)
    ]


def _standardized(value: float, group: Sequence[float]) -> float:
    std = statistics.stdev(group) if len(group) > 1 else 0.0
    return (value - statistics.fmean(group)) / std if std > 1e-9 else 0.0


def _call_part(name: str, call: Callable[[list[Any]], list[Any]], rows: list[Any]) -> list[Any]:
    with phase(f"reward {name}"):
        return call(rows)


def _call_inline(function: Callable[..., Any], rows: Sequence[Row]) -> list[Any]:
    return [function(**row) for row in rows]


def rm_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """The reward model's score."""
    score: float = extra_info["rm_score"]
    return score


def conversation_turns(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], reduce: str = "sum"
) -> Result:
    """Rewards of tools and interactions, each at the end of its turn; `mean` divides them by the number of turns."""
    rewards = [float(reward) for reward in extra_info.get("turn_rewards") or ()]
    if not rewards:
        return {"score": 0.0}
    return {"turn_rewards": [reward / len(rewards) for reward in rewards] if reduce == "mean" else rewards}


def conversation_scores(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], name: str | None = None
) -> float:
    """The conversation's reward, or the one of this name."""
    scores = extra_info.get("rollout_reward_scores") or {}
    return conversation_reward(scores) if name is None else float(scores.get(name, 0.0))


COLUMN_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "reward_model": rm_score,
    "turn_rewards": conversation_turns,
    "rollout_reward_scores": conversation_scores,
}
"""Sources that are columns of the batch already."""
