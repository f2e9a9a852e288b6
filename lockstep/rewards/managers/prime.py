"""The prime reward manager: scores samples in worker processes, whatever the function."""

from typing import Any, ClassVar

from lockstep.rewards.custom import ComputeScore
from lockstep.rewards.managers.naive import REWARD_MANAGERS, NaiveRewardManager

TIMEOUT_S = 300.0


@REWARD_MANAGERS.register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Like naive, always in worker processes: coroutine functions and built-in scorers too.

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
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, timeout_s, num_workers=num_workers)
