"""The DAPO reward manager (arXiv 2503.14476): scores minus a soft penalty for overlong responses."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lockstep.registry import did_you_mean
from lockstep.rewards.calls import Outcome
from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager, ScoringRow

KEY = "reward_model.reward_kwargs.overlong_buffer_cfg"


@dataclass(frozen=True)
class OverlongBuffer:
    """`overlong_buffer_cfg`.

    enable:         subtract the penalty.
    len:            number of tokens below the maximum response length over which the penalty grows to `penalty_factor`.
    penalty_factor: the penalty at the maximum response length.
    log:            log `overlong_reward` and `overlong` per sample.
    """

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0
    log: bool = False


@REWARD_MANAGERS.register("dapo")
@dataclass(eq=False, repr=False)
class DapoRewardManager(NaiveRewardManager):
    """Like naive, plus `acc` for scorers that return a number, and the overlong penalty

        min(0, -(num_tokens - (max_resp_len - len)) / len * penalty_factor)

    where max_resp_len is `data.max_response_length` unless `reward_model.reward_kwargs` sets it.
    """

    max_resp_len: int | None = None
    overlong_buffer_cfg: Mapping[str, Any] | OverlongBuffer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.max_resp_len
        self.overlong = read_overlong_buffer(self.overlong_buffer_cfg)
        if self.overlong.enable:
            if most is None:
                raise ValueError(f"{KEY}.enable needs reward_model.reward_kwargs.max_resp_len")
            if not 0 < self.overlong.len <= most:
                raise ValueError(f"{KEY}.len={self.overlong.len}: must be between 1 and max_resp_len={most}")

    def _read_outcomes(
        self, rows: list[ScoringRow], outcomes: list[Outcome]
    ) -> tuple[list[float], dict[str, list[Any]]]:
        scores, extra_info = super()._read_outcomes(rows, outcomes)
        numbers = [score if not isinstance(o, (dict, Exception)) else None for score, o in zip(scores, outcomes)]
        if any(number is not None for number in numbers):
            given = extra_info.get("acc", numbers)
            extra_info["acc"] = [number if number is not None else acc for number, acc in zip(numbers, given)]
        return scores, extra_info

    def _shape(self, rows: list[ScoringRow], scores: list[float], extra_info: dict[str, list[Any]]) -> None:
        if not self.overlong.enable:
            return
        assert self.max_resp_len is not None
        penalties = [overlong_penalty(row.num_tokens, self.max_resp_len, self.overlong) for row in rows]
        scores[:] = [score + penalty for score, penalty in zip(scores, penalties)]
        if self.overlong.log:
            extra_info["overlong_reward"] = list(penalties)
            extra_info["overlong"] = [penalty < 0 for penalty in penalties]


def overlong_penalty(num_tokens: int, max_resp_len: int, overlong: OverlongBuffer) -> float:
    """0 up to the buffer, then decreasing linearly."""
    excess = num_tokens - (max_resp_len - overlong.len)
    return min(0.0, -excess / overlong.len * overlong.penalty_factor)


def read_overlong_buffer(given: Mapping[str, Any] | OverlongBuffer | None) -> OverlongBuffer:
    """Parse the `overlong_buffer_cfg` section, which may be absent."""
    if given is None or isinstance(given, OverlongBuffer):
        return given or OverlongBuffer()
    known = [field.name for field in fields(OverlongBuffer)]
    for name in given:
        if name not in known:
            raise ValueError(f"{KEY}.{name}: no such key. {did_you_mean(name, known)}")
    return OverlongBuffer(**given)
