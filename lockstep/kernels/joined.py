"""Tensors that lie one behind the other in memory, seen as one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as one along the first dimension, without copying; None where they do not lie one behind the other."""
    first = tensors[0]
    if first is None:
        return None
    end, rows = first.data_ptr(), 0
    for tensor in tensors:
        if (
            tensor is None
            or not tensor.is_contiguous()
            or tensor.data_ptr() != end
            or tensor.shape[1:] != first.shape[1:]
        ):
            return None
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or tensor.dtype != first.dtype:
            return None
        end += tensor.numel() * tensor.element_size()
        rows += tensor.shape[0]
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def together(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors as one along the first dimension; copied only where they lie apart."""
    one = joined(tensors)
    return torch.cat([tensor.detach() for tensor in tensors]) if one is None else one
