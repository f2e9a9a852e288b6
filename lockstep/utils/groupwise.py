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


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased standard deviation and size of each group, all (G,); the variance is at least `eps`.

    scores (B,), gidx (B,) the group of each row. A group of one gets mean 0 and std 1, so that (s - mean) / std = s.
    """
    scores = scores.to(device) if device is not None else scores
    gidx = gidx.to(scores.device)
    count_G, sum_G = group_sum(torch.stack((torch.ones_like(scores), scores), 1), gidx).unbind(1)
    mean_G = sum_G / count_G
    square_G = group_sum((scores - mean_G[gidx]) ** 2, gidx)
    std_G = torch.sqrt((square_G / (count_G - 1).clamp(min=1)).clamp(min=eps))
    single_G = count_G == 1
    return mean_G.masked_fill(single_G, 0.0), std_G.masked_fill(single_G, 1.0), count_G
