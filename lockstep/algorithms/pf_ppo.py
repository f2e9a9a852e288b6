"""PF-PPO: resample the training batch from the scored samples, weighted by their scores (arXiv:2409.06957)."""

from typing import get_args

import torch
from torch import Tensor

from lockstep.config.algorithm import ReweightMethod
from lockstep.protocol import DataProto
from lockstep.protocol.tokens import row_sums
from lockstep.registry import did_you_mean


def pf_ppo_weights(scores_B: Tensor, reweight_method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """Unnormalized sampling weights, (B,).

    pow         |s| ** weight_pow
    max_min     1 for the best and the worst score of the batch, 0 for the others
    max_random  0.4 for the best score, 0.1 for the others
    """
    if reweight_method == "pow":
        weights_B = scores_B.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights_B = ((scores_B == scores_B.max()) | (scores_B == scores_B.min())).to(scores_B.dtype)
    elif reweight_method == "max_random":
        weights_B = torch.where(scores_B == scores_B.max(), 0.4, 0.1)
    else:
        raise ValueError(
            f"algorithm.pf_ppo.reweight_method={reweight_method}: no such method. "
            f"{did_you_mean(reweight_method, get_args(ReweightMethod))}"
        )
    return weights_B.clamp(min=1e-8)


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0, seed: int | None = None
) -> DataProto:
    """As many rows as `data` has, drawn with replacement by `pf_ppo_weights` of their token_level_scores.

    If every score is 0, all rows are equally likely. Call it after the advantages are computed, which need complete groups.
    Without a `seed`, torch's global generator is used.
    """
    return data.select_idxs(pf_ppo_rows(data, reweight_method, weight_pow, seed))


def pf_ppo_rows(data: DataProto, reweight_method: str, weight_pow: float, seed: int | None) -> list[int]:
    """The rows of `compute_pf_ppo_reweight_data`."""
    scores_B = row_sums(data.tensors, "token_level_scores").cpu()
    weights_B = pf_ppo_weights(scores_B, reweight_method, weight_pow)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rows: list[int] = torch.multinomial(weights_B, len(weights_B), replacement=True, generator=generator).tolist()
    return rows
