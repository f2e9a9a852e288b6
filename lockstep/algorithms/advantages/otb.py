"""Optimal token baseline: one baseline per position, weighted by the gradient energy up to it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.registry import register_adv_est
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.utils.groupwise import as_torch_index, group_sum


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """OTB (arXiv:2602.07078): A_t = G_t - B_t, with a baseline B_t per prompt and position.

    B_t = sum_i G_t W_t / (sum_i W_t + epsilon) over the group's samples i, G_t the undiscounted return to go
    W_t = sum over j <= t of 1 - 2 p_j + sum_v p_j(v)^2, the squared norm of the gradient in the logits so far

    `sum_pi_squared` (B, R) is that last sum. `rollout_is_weights` are squared and multiply the energy. With
    `handle_zero_tail`, positions that only the longest sample of a group reaches have baseline 0, because it would equal
    their own return; so does a group of one. For responses that contain tool output, use `tir_optimal_token_baseline`.
    Returns are G.
    """
    energy = 1.0 - 2.0 * torch.exp(old_log_probs) + sum_pi_squared  # |onehot - p|^2 of each token, (B, R)
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights**2
    mask = response_mask.to(token_level_rewards.dtype)
    returns = (token_level_rewards * mask).flip(-1).cumsum(-1).flip(-1)
    # a finished sample has weight 0 from there on
    weights = (energy * mask).cumsum(-1) * mask
    ids_B = as_torch_index(index, token_level_rewards.device)
    baseline = (group_sum(returns * weights, ids_B) / (group_sum(weights, ids_B) + epsilon))[ids_B]
    baseline = baseline * _has_peers(response_mask, ids_B, handle_zero_tail)
    return (returns - baseline) * mask, returns * mask


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """OTB for responses that contain tool output: the k-th policy token of a sample is compared with the k-th of the others."""
    # policy tokens first, in order; `argsort` of that order inverts it
    order = torch.argsort((~response_mask.bool()).long(), dim=-1, stable=True)
    inverse = torch.argsort(order, dim=-1)
    advantages, returns = compute_optimal_token_baseline_advantage(
        token_level_rewards.gather(-1, order),
        response_mask.gather(-1, order),
        index,
        old_log_probs.gather(-1, order),
        sum_pi_squared.gather(-1, order),
        None if rollout_is_weights is None else rollout_is_weights.gather(-1, order),
        handle_zero_tail,
        epsilon,
    )
    return advantages.gather(-1, inverse), returns.gather(-1, inverse)


def _has_peers(response_mask: Tensor, ids_B: Tensor, handle_zero_tail: bool) -> Tensor:
    """(B, R): whether other samples of the row's group reach the position.

    False in a group of one and, with `handle_zero_tail`, in the longest row past the length of the second longest.
    """
    length_B = response_mask.bool().sum(dim=-1)
    has_peers = torch.ones_like(response_mask, dtype=torch.bool)
    for group in range(int(ids_B.max()) + 1 if len(ids_B) else 0):
        rows = (ids_B == group).nonzero().squeeze(-1)
        if len(rows) == 1:
            has_peers[rows] = False
            continue
        (longest, second), places = torch.topk(length_B[rows], 2)
        if handle_zero_tail and longest > second:
            has_peers[rows[places[0]], second:] = False
    return has_peers
