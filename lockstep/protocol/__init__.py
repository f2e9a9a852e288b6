"""`DataProto`, the batch passed between the stages of a step, and the table of its keys (`lockstep.protocol.keys`)."""

from lockstep.protocol.columns import (
    list_of_dict_to_dict_of_list,
    object_array,
    union_numpy_dict,
    union_tensor_dict,
)
from lockstep.protocol.data_proto import DataProto, DataProtoItem, collate_fn
from lockstep.protocol.future import DataProtoFuture
from lockstep.protocol.keys import BATCH_KEYS, BatchKey
from lockstep.protocol.padding import (
    PADDING_KEY,
    drop_marked,
    fold_batch_dim,
    pad_and_mark,
    pad_dataproto_to_divisor,
    real_rows,
    unfold_batch_dim,
    unpad_dataproto,
)
from lockstep.protocol.ragged import Ragged, RaggedBatch
from lockstep.protocol.require import require

__all__ = [
    "BATCH_KEYS",
    "PADDING_KEY",
    "BatchKey",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Ragged",
    "RaggedBatch",
    "collate_fn",
    "drop_marked",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "object_array",
    "pad_and_mark",
    "pad_dataproto_to_divisor",
    "real_rows",
    "require",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
