"""DAPO's group filter: keep the prompts whose samples have different scores."""

import torch
from torch import Tensor

from lockstep.protocol import DataProto
from lockstep.protocol.tokens import row_sums
from lockstep.registry import did_you_mean
from lockstep.utils.groupwise import as_torch_index

_SUMS = {"score": "token_level_scores", "seq_reward": "token_level_scores", "seq_final_reward": "token_level_rewards"}
"""Metric to the (B, R) key that is summed."""


def keep_informative_groups(batch: DataProto, metric: str | None = None) -> list[int]:
    """The rows, in order, of the groups (by uid) whose samples differ in `metric` (DAPO, arXiv:2503.14476).

    metric: score or seq_reward, the row's reward before the KL penalty (the default); seq_final_reward, the reward after it;
    or a column that the reward function returned, such as acc. A group of one is kept.
    """
    values_B = _metric(batch, metric or "score")
    ids_B = as_torch_index(batch.non_tensor_batch["uid"])
    keep: list[int] = []
    for group in range(int(ids_B.max()) + 1 if len(ids_B) else 0):
        rows = (ids_B == group).nonzero().squeeze(-1)
        values = values_B[rows]
        if len(rows) == 1 or values.max() > values.min():
            keep += rows.tolist()
    return sorted(keep)


def _metric(batch: DataProto, metric: str) -> Tensor:
    if metric in _SUMS:
        key = _SUMS[metric]
        if key not in batch.tensors:
            raise ValueError(
                f"algorithm.filter_groups.metric={metric}: {key} is not computed yet when groups are filtered"
            )
        return row_sums(batch.tensors, key).cpu()
    if metric not in batch.non_tensor_batch:
        known = [*_SUMS, *batch.non_tensor_batch]
        raise ValueError(
            f"algorithm.filter_groups.metric={metric}: the reward function did not return it. {did_you_mean(metric, known)}"
        )
    try:
        return torch.tensor([float(value) for value in batch.non_tensor_batch[metric]], dtype=torch.float64)
    except (TypeError, ValueError):
        raise ValueError(f"algorithm.filter_groups.metric={metric}: must be one number per row") from None
