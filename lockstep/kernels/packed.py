"""Tensors that are adjacent in memory, seen as one: one product then serves several linear layers with the same input."""

from collections.abc import Sequence

import torch
from torch import Tensor


def packed_view(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors concatenated along the first dimension without a copy; None if they are not adjacent in memory."""
    first = tensors[0]
    if first is None or not first.is_contiguous():
        return None
    dtype = first.dtype
    size = first.shape[1:]
    storage = first.untyped_storage().data_ptr()
    end = first.data_ptr() + first.nbytes
    rows = first.shape[0]
    for tensor in tensors[1:]:
        if tensor is None or tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        if tensor.shape[1:] != size or tensor.dtype != dtype or tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.nbytes
        rows += tensor.shape[0]
    return first.detach().as_strided((rows, *size), first.stride())


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors concatenated along the first dimension; copied only if they are not adjacent."""
    if len(tensors) == 1:
        return tensors[0].detach()
    view = packed_view(tensors)
    return torch.cat([tensor.detach() for tensor in tensors]) if view is None else view
