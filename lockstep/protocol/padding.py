"""Pad batches with rows so that they divide evenly; padding rows are marked and dropped later.

rows 0 1 2 3 4 ──► pad to 6: 0 1 2 3 4 0 ──► split over workers ──► join ──► drop the marked row: 0 1 2 3 4
"""

import numpy as np
import torch

from lockstep.protocol.columns import tensors_of
from lockstep.protocol.data_proto import DataProto

PADDING_KEY = "is_padding"
"""Non-tensor key of a padded batch: True for padding rows."""


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat the first rows at the end until the size is divisible by `size_divisor`; returns the batch and the number added."""
    if size_divisor < 1:
        raise ValueError(f"pad_dataproto_to_divisor: size_divisor must be at least 1, not {size_divisor}")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last `pad_size` rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def pad_and_mark(data: DataProto, size_divisor: int) -> DataProto:
    """Like `pad_dataproto_to_divisor`, with the added rows marked under `is_padding`; no marks if none were added."""
    padded, pad_size = pad_dataproto_to_divisor(data, size_divisor)
    if pad_size:
        marks = padded.non_tensor_batch.get(PADDING_KEY, np.zeros(len(padded), dtype=bool)).astype(bool)
        marks[len(data) :] = True
        padded.non_tensor_batch[PADDING_KEY] = marks
    return padded


def drop_marked(data: DataProto) -> DataProto:
    """The batch without padding rows and without the marks."""
    if PADDING_KEY not in data.non_tensor_batch:
        return data
    real = ~data.non_tensor_batch[PADDING_KEY].astype(bool)
    kept = data.select_idxs(real)
    del kept.non_tensor_batch[PADDING_KEY]
    return kept


def real_rows(data: DataProto) -> torch.Tensor:
    """(B,) bool: False for padding rows. Losses multiply their masks by it."""
    if PADDING_KEY not in data.non_tensor_batch:
        return torch.ones(len(data), dtype=torch.bool)
    return torch.from_numpy(~data.non_tensor_batch[PADDING_KEY].astype(bool))


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Fold B rows into (new_batch_size, B / new_batch_size), adding a second batch dimension."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise ValueError(f"fold_batch_dim: {len(data)} rows do not fold into {new_batch_size}")
    inner = len(data) // new_batch_size
    batch = None if data.batch is None else data.batch.view(new_batch_size, inner)
    if batch is not None:
        batch.batch_size = torch.Size([new_batch_size])
    arrays = {k: v.reshape(new_batch_size, inner, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    return DataProto(batch, arrays, dict(data.meta_info))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The inverse of `fold_batch_dim`: the first `batch_dims` dimensions become one."""
    batch = None
    if data.batch is not None:
        columns = {k: v.flatten(0, batch_dims - 1) for k, v in tensors_of(data.batch).items()}
        batch = DataProto.from_dict(columns).batch
    arrays = {k: v.reshape(-1, *v.shape[batch_dims:]) for k, v in data.non_tensor_batch.items()}
    return DataProto(batch, arrays, dict(data.meta_info))
