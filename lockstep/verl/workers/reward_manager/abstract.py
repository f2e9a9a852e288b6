"""verl.workers.reward_manager.abstract"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from lockstep.protocol import DataProto
from lockstep.rewards.custom import ComputeScore

RawRewardFn = ComputeScore


class AbstractRewardManager(ABC):
    """Base class of a program's own manager."""

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Rewards (B, R), or a dict with `reward_tensor` and `reward_extra_info`."""
