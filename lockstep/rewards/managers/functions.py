"""The reward manager of `RewardFunctions`: like batch, and each row's `extra_info` also has its prompt and its columns."""

from dataclasses import replace

from lockstep.protocol import DataProto
from lockstep.rewards.managers.batch import BatchRewardManager
from lockstep.rewards.managers.naive import REWARD_MANAGERS, ScoringRow

NOT_COLUMNS = {
    "raw_prompt",
    "raw_prompt_ids",
    "uid",
    "extra_info",
    "reward_model",
    "tools_kwargs",
    "interaction_kwargs",
}


@REWARD_MANAGERS.register("functions")
class FunctionsRewardManager(BatchRewardManager):
    def _rows(self, data: DataProto) -> list[ScoringRow]:
        columns = {name: values for name, values in data.non_tensor_batch.items() if name not in NOT_COLUMNS}
        if "raw_prompt" in data.non_tensor_batch:
            columns["prompt"] = data.non_tensor_batch["raw_prompt"]
        return [
            replace(row, extra_info={name: values[i] for name, values in columns.items()} | row.extra_info)
            for i, row in enumerate(super()._rows(data))
        ]
