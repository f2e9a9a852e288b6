"""Mini-batch statistics that a policy loss needs before the first backward.

A loss sees one micro-batch on one rank. A loss that compares tokens over the mini-batch (clip_cov, kl_cov) or divides by its
number of rows (geo_mean) registers a `prepare` function. It is called once per mini-batch on the controller, with all rows and
the columns that exist before the forward. Its result, one entry per row, is added to the rows and passed to the loss as keyword
arguments, so that the loss does not depend on the micro-batch split.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lockstep.config.actor_rollout_ref import ActorConfig


@dataclass(frozen=True)
class MiniBatch:
    """All rows of a mini-batch.

    rows: old_log_probs, advantages, response_mask, ... (B, R).
    seed: for random draws; differs between mini-batches.
    """

    rows: Mapping[str, Tensor]
    seed: int = 0


Prepare = Callable[[MiniBatch, ActorConfig], dict[str, Tensor]]
"""-> keyword arguments of the loss, each a tensor with one entry per row."""
