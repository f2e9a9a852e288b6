"""Statistics over groups of rows, such as the samples of one prompt; groups may have any order and size."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_torch_index(index: Sequence[Any] | np.ndarray | Tensor, device: torch.device | str | None = "cpu") -> Tensor:
    """Number the groups 0..G-1 in order of first appearance: (B,) int64. `index` holds one hashable id per row."""
    number: dict[Any, int] = {}
    ids = index.tolist() if isinstance(index, Tensor | np.ndarray) else index
    return torch.tensor([number.setdefault(i, len(number)) for i in ids], dtype=torch.int64, device=device)


def group_sum(values: Tensor, ids_B: Tensor) -> Tensor:
    """Sum over the rows of each group, (B, ...) to (G, ...)."""
    num_groups = int(ids_B.max()) + 1 if len(ids_B) else 0
    return values.new_zeros((num_groups, *values.shape[1:])).index_add_(0, ids_B, values)


def group_mean(scores_B: Tensor, ids_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """(G,) mean of each group, weighted if there are weights (0 weights: the plain first score).

    Computed relative to the group's first score: the mean of equal scores is exactly that score, so they deviate by 0.
    """
    weight_B = torch.ones_like(scores_B) if weight_B is None else weight_B
    first_G = first_of_group(scores_B, ids_B)
    sum_G, total_G = group_sum(torch.stack((weight_B * (scores_B - first_G[ids_B]), weight_B), 1), ids_B).unbind(1)
    return first_G + sum_G / total_G.clamp(min=1)


def first_of_group(values_B: Tensor, ids_B: Tensor) -> Tensor:
    """(G,) the value of each group's first row."""
    num_rows, num_groups = len(ids_B), int(ids_B.max()) + 1 if len(ids_B) else 0
    rows = torch.arange(num_rows, device=ids_B.device)
    # a group without rows gets the last one
    return values_B[ids_B.new_full((num_groups,), num_rows - 1).scatter_reduce_(0, ids_B, rows, "amin")]


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased standard deviation and size of each group, all (G,); the variance is at least `eps`.

    scores (B,), gidx (B,) the group of each row. A group of one gets mean 0 and std 1, so that (s - mean) / std = s.
    """
    scores = scores.to(device) if device is not None else scores
    gidx = gidx.to(scores.device)
    count_G, mean_G = group_sum(torch.ones_like(scores), gidx), group_mean(scores, gidx)
    square_G = group_sum((scores - mean_G[gidx]) ** 2, gidx)
    std_G = torch.sqrt((square_G / (count_G - 1).clamp(min=1)).clamp(min=eps))
    single_G = count_G == 1
    return mean_G.masked_fill(single_G, 0.0), std_G.masked_fill(single_G, 1.0), count_G
