"""The critic's loss."""

from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.losses.aggregate import agg_loss
from lockstep.utils.masked import masked_mean


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **counts: Any,
) -> tuple[Tensor, Tensor]:
    """Clipped value loss and the fraction of tokens whose loss is clipped.

    L = 0.5 max((v - G)^2, (clip(v, v_old +- cliprange_value) - G)^2), all (B, R), aggregated like the policy loss;
    `counts` are those of `agg_loss`. The fraction is detached and over this call's tokens.
    """
    clipped_vpreds = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    unclipped = (vpreds - returns) ** 2
    clipped = (clipped_vpreds - returns) ** 2
    loss = 0.5 * agg_loss(torch.maximum(unclipped, clipped), response_mask, loss_agg_mode, **counts)
    clipfrac = masked_mean((clipped > unclipped).float(), response_mask).detach()
    return loss, clipfrac
