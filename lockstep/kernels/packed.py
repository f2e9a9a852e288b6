"""Tensors that are adjacent in memory, seen as one: one product then serves several linear layers with the same input."""

from collections.abc import Sequence

import torch
from torch import Tensor


def packed_view(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors concatenated along the first dimension without a copy; None if they are not adjacent in memory."""
    first = tensors[0]
    if first is None:
        return None
    end, rows = first.data_ptr(), 0
    for tensor in tensors:
        if tensor is None or not tensor.is_contiguous() or tensor.data_ptr() != end:
            return None
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            return None
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += tensor.numel() * tensor.element_size()
        rows += tensor.shape[0]
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors concatenated along the first dimension; copied only if they are not adjacent."""
    if len(tensors) == 1:
        return tensors[0].detach()
    view = packed_view(tensors)
    return torch.cat([tensor.detach() for tensor in tensors]) if view is None else view
