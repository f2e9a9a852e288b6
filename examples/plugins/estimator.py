"""An advantage estimator: the score minus the median of the prompt's samples.

algorithm.adv_estimator=examples/plugins/estimator.py:median_baseline
algorithm.adv_kwargs.scale=0.5
"""

import torch

from lockstep.algorithms.advantages import register_adv_est


@register_adv_est("median_baseline")
def median_baseline(token_level_rewards, response_mask, index, *, scale: float = 1.0, **kwargs):
    """(B, R) rewards and mask, the prompt of each row -> (advantages, returns), both (B, R) and 0 outside the mask.

    scale: a setting; it multiplies the advantages.
    """
    scores = token_level_rewards.sum(-1)
    groups = {uid: [i for i, other in enumerate(index) if other == uid] for uid in set(index)}
    baselines = torch.stack([scores[groups[uid]].median() for uid in index])
    advantages = scale * (scores - baselines)[:, None] * response_mask
    return advantages, advantages
