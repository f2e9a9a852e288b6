"""`DataProto` and its helpers."""

from lockstep.protocol import (
    DataProto,
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
