"""verl.experimental.reward_loop.reward_manager.base: a manager scores one row, and the rows of a batch at once.

@register("mine")                                      reward_model.reward_manager=mine
class Mine(RewardManagerBase):
    async def run_single(self, data):                  one row
        return {"reward_score": 1.0, "reward_extra_info": {"acc": 1.0}}
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from lockstep.protocol import DataProto
from lockstep.rewards.custom import ComputeScore
from lockstep.rewards.default import default_compute_score
from lockstep.rewards.managers.naive import last_token_positions, place_scores
from lockstep.utils import event_loop


class RewardManagerBase(ABC):
    """
    config:        the program's config; managers read `reward_model.*` from it.
    compute_score: the reward function, also a coroutine function; None is the default by `data_source`.
    """

    _class_initialized = False

    def __init__(
        self,
        config: Any = None,
        tokenizer: Any = None,
        compute_score: ComputeScore | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
        num_examine: int | None = None,
        reward_fn_key: str | None = None,
        **unused: Any,
    ) -> None:
        self.config: Any = OmegaConf.create({}) if config is None else config
        self.tokenizer = tokenizer
        self.compute_score: ComputeScore = compute_score or default_compute_score
        self.reward_router_address = reward_router_address
        self.reward_model_tokenizer = reward_model_tokenizer
        self.reward_fn_key = reward_fn_key or "data_source"
        self.init_class(self.config, tokenizer)

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any) -> None:
        """Set what all objects of the class share; called by each constructor, done by the first."""
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """`reward_score` and `reward_extra_info` of one row."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Rewards (B, R) at the last token of each response; with `return_dict` also the extra information by name."""
        tensors = data.tensors
        if "rm_scores" in tensors.keys():  # noqa: SIM118 (a TensorDict is not a mapping)
            return (
                {"reward_tensor": tensors["rm_scores"], "reward_extra_info": {}}
                if return_dict
                else tensors["rm_scores"]
            )
        results = event_loop.run(lambda: self._run_all(data))
        scores = [float(result["reward_score"]) for result in results]
        rewards = place_scores(scores, last_token_positions(data), tensors["responses"].shape[1])
        infos = [result.get("reward_extra_info") or {} for result in results]
        names = dict.fromkeys(name for info in infos for name in info)
        extra = {name: [info.get(name) for info in infos] for name in names}
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards

    async def _run_all(self, data: DataProto) -> list[dict[str, Any]]:
        return await event_loop.all_of([self.run_single(data[row : row + 1]) for row in range(len(data))])

    def response_of(self, data: DataProto) -> str:
        """The response of one row as text."""
        width = data.tensors["responses"].shape[1]
        attended = data.tensors["attention_mask"][0, -width:].bool()
        text: str = self.tokenizer.decode(data.tensors["responses"][0][attended].tolist(), skip_special_tokens=True)
        return text

    async def score_of(self, data: DataProto) -> Any:
        """What the reward function returns for one row; a plain function runs in a thread."""
        row = data.non_tensor_batch
        extra = dict((row["extra_info"][0] if "extra_info" in row else None) or {})
        if "__num_turns__" in row:
            extra["num_turns"] = row["__num_turns__"][0]
        arguments = {
            "data_source": row[self.reward_fn_key][0],
            "solution_str": await asyncio.to_thread(self.response_of, data),
            "ground_truth": row["reward_model"][0].get("ground_truth"),
            "extra_info": extra,
        }
        function = self.compute_score
        if inspect.iscoroutinefunction(getattr(function, "func", function)):
            return await function(**arguments)
        return await asyncio.to_thread(function, **arguments)


def as_result(outcome: Any) -> dict[str, Any]:
    """The score of a reward function and its other results; a bare number is also the accuracy."""
    if isinstance(outcome, dict):
        extra = {name: value for name, value in outcome.items() if name != "score"}
        return {"reward_score": float(outcome["score"]), "reward_extra_info": extra}
    score = float(outcome[0] if isinstance(outcome, tuple | list) else outcome)
    return {"reward_score": score, "reward_extra_info": {"acc": score}}
