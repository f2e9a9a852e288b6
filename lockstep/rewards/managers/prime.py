"""The prime reward manager: scores samples in parallel worker processes that can be killed."""

import os
from typing import Any, ClassVar

from lockstep.rewards.custom import ComputeScore
from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager

MAX_DEFAULT_WORKERS = 16
TIMEOUT_S = 300.0


@REWARD_MANAGERS.register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Like naive, in `num_workers` worker processes, for scorers that are slow or run programs.

    The function must be importable by name in a fresh process: defined at the top level of a module or of the file in
    `custom_reward_function.path`. A call that hangs or crashes fails only its own sample.
    """

    always_workers: ClassVar[bool] = True

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        timeout_s: float | None = TIMEOUT_S,
        num_workers: int | None = None,
    ) -> None:
        workers = num_workers if num_workers is not None else min(os.cpu_count() or 1, MAX_DEFAULT_WORKERS)
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, timeout_s, num_workers=workers)
