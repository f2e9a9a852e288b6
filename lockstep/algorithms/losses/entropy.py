"""Entropy of the policy, per token and as a loss term."""

from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.losses.aggregate import agg_loss


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last dimension: -sum_v p_v log p_v.

    logsumexp(z) - sum_v p_v z_v would multiply the rounding error of sum p by the largest logit. Allocates two more tensors
    of the logits' size; training computes entropies from hidden states in chunks instead.
    """
    log_p = torch.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def compute_entropy_loss(
    logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean", **counts: Any
) -> Tensor:
    """Entropy of the tokens' distributions, from logits (B, R, V), aggregated like the policy loss.

    The actor's loss adds it with weight -entropy_coeff. `counts` are those of `agg_loss`.
    """
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, **counts)
