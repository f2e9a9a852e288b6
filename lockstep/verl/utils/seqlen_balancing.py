"""verl.utils.seqlen_balancing"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.protocol import DataProto
from lockstep.utils.seqlen import (
    calculate_workload as calculate_workload,
    get_group_balanced_partitions as get_group_balanced_partitions,
    get_reverse_idx as get_reverse_idx,
    get_seqlen_balanced_partitions as get_seqlen_balanced_partitions,
    log_seqlen_unbalance as log_seqlen_unbalance,
    rearrange_micro_batches as rearrange_micro_batches,
)


def prepare_dynamic_batch(
    data: DataProto, max_token_len: int, dp_group: Any = None, **options: Any
) -> tuple[list[DataProto], list[list[int]]]:
    """Micro-batches of at most `max_token_len` tokens, and the rows of each."""
    _, rows = rearrange_micro_batches(data.tensors, max_token_len, dp_group, **options)
    return [data.select_idxs(part) for part in rows], rows


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """The rows of the joined micro-batches in their original order."""
    return data[torch.tensor(get_reverse_idx([row for part in batch_idx_list for row in part]))]


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def roundup_divisible(a: int, b: int) -> int:
    return ceildiv(a, b) * b
