"""What a policy loss must know of the whole mini-batch before the first backward.

A loss sees one micro-batch on one rank. One that compares tokens over the mini-batch (clip_cov, kl_cov) or divides by its
rows (geo_mean) has a preparation beside it: called once for each mini-batch on the controller, where all its rows are, with
the columns that are there before the forward. Its result is one tensor per row, which travels with the rows into the
micro-batches and reaches the loss as keyword arguments. So the loss does not depend on the split.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lockstep.config.actor_rollout_ref import ActorConfig


@dataclass(frozen=True)
class MiniBatch:
    """All rows of a mini-batch.

    rows: columns: old_log_probs, advantages, response_mask, ... (B, R).
    seed: of random draws; another one for each mini-batch.
    """

    rows: Mapping[str, Tensor]
    seed: int = 0


Prepare = Callable[[MiniBatch, ActorConfig], dict[str, Tensor]]
"""-> keyword arguments of the loss, each a tensor with one entry per row."""
