"""verl.experimental.reward_loop.reward_manager.naive"""

from typing import Any

from lockstep.protocol import DataProto
from lockstep.verl.experimental.reward_loop.reward_manager.base import RewardManagerBase, as_result


class NaiveRewardManager(RewardManagerBase):
    """Calls the reward function for each row."""

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        return as_result(await self.score_of(data))
