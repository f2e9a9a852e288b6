"""Check the keys of a batch before a stage reads them.

A worker method starts with `require(data, "responses", "advantages")`, so that a skipped stage is a clear error and not a
KeyError deep inside a loss.
"""

from lockstep.protocol.data_proto import DataProto
from lockstep.protocol.keys import BATCH_KEYS, BatchKey
from lockstep.protocol.ragged import is_ragged
from lockstep.registry import did_you_mean


def require(data: DataProto, *names: str) -> None:
    """Check that the batch has the named keys with the shape and dtype of the table.

    KeyError for a missing key, ValueError for a wrong dtype or shape. P, R and T must agree between the keys.
    """
    lengths: dict[str, tuple[int, str]] = {"B": (len(data), "the batch")}
    for name in names:
        if name not in BATCH_KEYS:
            raise KeyError(f"{name!r} is not a batch key. {did_you_mean(name, BATCH_KEYS)}")
        key = BATCH_KEYS[name]
        shape = _checked_shape(data, key)
        for letter, length in zip(key.shape, shape):
            known, owner = lengths.setdefault(letter, (length, repr(name)))
            if known != length:
                raise ValueError(f"batch key {name!r} has shape {shape}: {letter} is {length}, but {known} in {owner}")
    if {"P", "R", "T"} <= lengths.keys() and lengths["P"][0] + lengths["R"][0] != lengths["T"][0]:
        parts = ", ".join(f"{letter} = {lengths[letter][0]} in {lengths[letter][1]}" for letter in "PRT")
        raise ValueError(f"batch lengths do not add up to T = P + R: {parts}")


def _checked_shape(data: DataProto, key: BatchKey) -> tuple[int, ...]:
    columns = data.non_tensor_batch if key.dtype is None else () if data.batch is None else data.batch.keys()
    if key.name not in columns:
        raise KeyError(f"batch key {key.name!r} is missing: it is written by {key.written_by}")
    if key.dtype is None:
        return tuple(data.non_tensor_batch[key.name].shape)
    if is_ragged(data.batch):
        shape, dtype = data.batch.shape_of(key.name), data.batch.dtype_of(key.name)
    else:
        column = data.tensors[key.name]
        shape, dtype = tuple(column.shape), column.dtype
    if dtype != key.dtype:
        raise ValueError(f"batch key {key.name!r} is {dtype}, it must be {key.dtype}")
    if len(shape) != len(key.shape):
        raise ValueError(f"batch key {key.name!r} has shape {shape}, it must be ({', '.join(key.shape)})")
    return shape
