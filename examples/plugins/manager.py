"""A reward manager: scores each response by itself, then subtracts a penalty per token.

reward_model.reward_manager=examples/plugins/manager.py:TokenPenalty
"""

from lockstep.rewards.managers import REWARD_MANAGERS, NaiveRewardManager


@REWARD_MANAGERS.register("token_penalty")
class TokenPenalty(NaiveRewardManager):
    def __init__(self, *args, cost=0.001, **kwargs):
        """cost: set by reward_model.reward_kwargs.cost."""
        super().__init__(*args, **kwargs)
        self.cost = cost

    def _shape(self, rows, scores, extra_info):
        extra_info["unshaped"] = list(scores)
        scores[:] = [score - self.cost * row.num_tokens for row, score in zip(rows, scores)]
