"""How the stages of a step read a batch: the cost depends on its real tokens, if the batch is kept without padding."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor

from lockstep.protocol.columns import Batch, names_of
from lockstep.protocol.data_proto import DataProto
from lockstep.protocol.images import IMAGES, ImageInputs, with_content
from lockstep.protocol.ragged import Ragged, is_ragged

MAX_PADDED = 2**22
"""Entries of a padded column that a stage looks at together; it takes a large batch a few rows at a time."""


def lengths_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """(B,) tokens of each prompt, and of each response."""
    if is_ragged(batch) and (tokens := batch.tokens()) is not None:
        return tokens[0].lengths, tokens[1].lengths
    mask, width = read(batch, "attention_mask").bool(), shape_of(batch, "responses")[1]
    return mask[:, :-width].sum(-1), mask[:, -width:].sum(-1)


def token_rows(batch: Batch, name: str) -> list[Tensor]:
    """The tokens of each row without padding. name: prompts or responses."""
    if is_ragged(batch) and (tokens := batch.tokens()) is not None:
        return list(tokens[name == "responses"].rows())
    ids, mask = read(batch, name), read(batch, "attention_mask")
    mask = mask[:, -ids.shape[1] :] if name == "responses" else mask[:, : ids.shape[1]]
    return [row[keep] for row, keep in zip(ids, mask.bool())]


def entries(batch: Batch, *names: str) -> list[Tensor]:
    """(N,) the entries of columns of responses, in the same order: at least those at response tokens."""
    if is_ragged(batch):
        columns = [batch.pack().stored(name) for name in names]
        ragged = [column for column in columns if isinstance(column, Ragged)]
        if len(ragged) == len(names) and all(torch.equal(column.lengths, ragged[0].lengths) for column in ragged):
            return [column.values for column in ragged]
    return [read(batch, name).flatten() for name in names]


def read(batch: Batch, name: str) -> Tensor:
    """A padded column, which a batch without padding does not keep."""
    column: Tensor = batch.read(name) if is_ragged(batch) else batch[name]
    return column


def column(batch: Batch, name: str) -> Any:
    """A column as it is stored, to be put back under this or another name."""
    stored = batch.pack().stored(name) if is_ragged(batch) else None
    return read(batch, name) if stored is None else stored


def shape_of(batch: Batch, name: str) -> tuple[int, ...]:
    return batch.shape_of(name) if is_ragged(batch) else tuple(batch[name].shape)


def row_sums(batch: Batch, name: str) -> Tensor:
    """(B,) the sum of each row of a column of responses."""
    stored = batch.pack().stored(name) if is_ragged(batch) else None
    if isinstance(stored, Ragged) and stored.values.dim() == 1 and not stored.values.is_floating_point():
        ends = stored.lengths.cumsum(0)
        totals = torch.nn.functional.pad(stored.values.cumsum(0, dtype=torch.int64), (1, 0))
        return totals[ends] - totals[ends - stored.lengths]
    return torch.cat([read(part, name).sum(-1) for part in row_chunks(batch)])


def row_chunks(batch: Batch) -> Iterator[Batch]:
    """The rows in parts, each small enough to be padded; a small or padded batch is one part."""
    num_rows = rows_per_part(batch)
    if len(batch) <= num_rows:
        yield batch
        return
    for start in range(0, len(batch), num_rows):
        yield batch[start : start + num_rows]


def rows_per_part(batch: Batch) -> int:
    """Rows that are small enough to be padded together."""
    return max(1, MAX_PADDED // max(1, batch.shape_of("responses")[1])) if is_ragged(batch) else len(batch)


def prompt_owners(batch: Batch) -> list[int]:
    """For each row, the first row with the same prompt and images; a row without a response is its own."""
    answered = lengths_of(batch)[1].tolist()
    images = images_of(batch) or [None] * len(batch)
    if is_ragged(batch) and (tokens := batch.tokens()) is not None:
        prompts: Iterable[np.ndarray] = (row.numpy() for row in tokens[0].rows())
    else:
        width = shape_of(batch, "responses")[1]
        ids, mask = (read(batch, name)[:, :-width] for name in ("input_ids", "attention_mask"))
        prompts = ids.masked_fill(mask == 0, -1).numpy()
    return first_alike((with_content(row, image).tobytes() for row, image in zip(prompts, images)), answered)


def images_of(batch: Batch) -> list[ImageInputs | None] | None:
    """The images of each row; None if the batch has no column of them."""
    if IMAGES not in names_of(batch):
        return None
    found: list[ImageInputs | None] = (batch.read(IMAGES) if is_ragged(batch) else batch.get(IMAGES)).tolist()
    return found


def with_images(data: DataProto) -> Batch:
    """The tensors of the batch and, if it has one, the column of images, for engines."""
    if IMAGES not in data.non_tensor_batch:
        return data.tensors
    batch: Batch = data.tensors.copy()
    batch[IMAGES] = image_column(data.non_tensor_batch[IMAGES])
    return batch


def image_keys(data: DataProto) -> list[str]:
    """The non-tensor columns that every forward of the rows needs; none if no row has images, as for a text model.

    data: the rows of all ranks, which must agree.
    """
    images = data.non_tensor_batch.get(IMAGES, ())
    return [IMAGES] if any(image is not None for image in images) else []


def without_empty_images(data: DataProto) -> DataProto:
    """The rows without the column of images, if no row has any; see `image_keys`."""
    if image_keys(data):
        return data
    return data.select(non_tensor_batch_keys=[name for name in data.non_tensor_batch if name != IMAGES])


def image_column(images: Iterable[ImageInputs | None]) -> Any:
    """The images of each row as a column of a batch of tensors."""
    return NonTensorStack(*map(NonTensorData, images))


def first_alike(prompts: Iterable[bytes], answered: Sequence[int]) -> list[int]:
    """`prompt_owners`, from the prompts in any form and the lengths of the responses."""
    first: dict[bytes, int] = {}
    return [first.setdefault(prompt, i) if answered[i] else i for i, prompt in enumerate(prompts)]


def pack(data: DataProto) -> DataProto:
    """Drop the padding that stages added to a batch of rollouts."""
    if is_ragged(data.batch):
        data.batch.pack()
    return data
