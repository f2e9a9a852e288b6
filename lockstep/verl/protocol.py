"""`DataProto` and its helpers."""

from collections.abc import Mapping
from typing import Any

from lockstep import protocol
from lockstep.protocol import (
    DataProtoFuture,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from lockstep.verl._names import exports

__all__ = [
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "collate_fn",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

__getattr__ = exports(__name__)


class DataProto(protocol.DataProto):
    """Lockstep's batch, in the forms in which programs on verl construct and join it: `DataProto(batch={"x": tensor})`,
    `split(n_parts=2)`, `union(a, b, c)`."""

    def __post_init__(self) -> None:
        if isinstance(self.batch, Mapping):
            made = protocol.DataProto.from_dict(dict(self.batch), self.non_tensor_batch)
            self.batch, self.non_tensor_batch = made.batch, made.non_tensor_batch
        super().__post_init__()

    def split(self, split_size: int | None = None, n_parts: int | None = None) -> list[Any]:
        """Parts of `split_size` rows, of which the last may be shorter, or `n_parts` equal parts."""
        if (split_size is None) == (n_parts is None):
            raise TypeError("split needs either split_size, the rows of a part, or n_parts")
        return self.chunk(n_parts) if n_parts is not None else super().split(split_size)  # type: ignore[arg-type]

    def union(self, *others: protocol.DataProto) -> "DataProto":
        """Add the keys of the others in place."""
        for other in others:
            super().union(other)
        return self


def adopt(data: protocol.DataProto) -> DataProto:
    """A batch of Lockstep's own class with the methods above; tensors are shared."""
    return data if isinstance(data, DataProto) else DataProto(data.batch, data.non_tensor_batch, data.meta_info)
