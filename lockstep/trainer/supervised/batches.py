"""Samples of a dataset as rows for the engine, and a rank's share of a global batch.

sample:  s1 u1 u2 a1 a2 u3 a3        loss_mask 0 0 0 1 1 0 1
row:     pad s1 u1 u2 | a1 a2 u3 a3 pad      prompt: all before the first trained token; response: the rest, masked

A pair is two rows, the chosen answer and then the rejected one. They share a prompt, which packing computes once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.protocol import DataProto, object_array
from lockstep.protocol.images import IMAGES
from lockstep.protocol.tokens import image_column, images_of, with_images
from lockstep.trainer.ppo.mini_batches import MiniBatches, clear_rows, lay_out, spread

Sample = dict[str, Any]
"""input_ids, loss_mask; optionally position_ids, and attention_mask if it is padded; each (L,). multi_modal_inputs: its images."""


def collate(samples: Sequence[Sample]) -> TensorDict:
    """One batch of left-padded prompts and right-padded responses.

    A sequence's first token has nothing before it that predicts it, so it is never trained.
    """
    rows = [_arrays(sample) for sample in samples]
    prompts = [_prompt_length(mask) for _, _, mask in rows]
    before = max(prompts)
    width = max(len(ids) - prompt for (ids, _, _), prompt in zip(rows, prompts))
    names = ("input_ids", "position_ids", "response_mask")
    batch = {name: np.zeros((len(rows), before + width), np.int64) for name in (*names, "attention_mask")}
    for i, (row, prompt) in enumerate(zip(rows, prompts)):
        place = slice(before - prompt, before - prompt + len(row[0]))
        batch["attention_mask"][i, place] = 1
        for name, values in zip(names, row):
            batch[name][i, place] = values
    tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
    tensors["response_mask"] = tensors["response_mask"][:, before:]
    found = TensorDict(tensors | {"responses": tensors["input_ids"][:, before:]}, batch_size=[len(rows)])
    if any(sample.get(IMAGES) is not None for sample in samples):
        found[IMAGES] = image_column([sample.get(IMAGES) for sample in samples])
    return found


def _arrays(sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, positions and loss mask, without padding."""
    ids, mask = sample["input_ids"].numpy(), sample["loss_mask"].numpy().copy()
    positions = sample["position_ids"].numpy() if "position_ids" in sample else np.arange(len(ids))
    if "attention_mask" in sample:
        kept = sample["attention_mask"].numpy().astype(bool)
        ids, mask, positions = ids[kept], mask[kept], positions[kept]
    mask[:1] = 0
    return ids, positions, mask


def _prompt_length(mask: np.ndarray) -> int:
    """Tokens before the first trained one; all but the last if none is trained."""
    return int(mask.argmax()) if mask.any() else max(len(mask) - 1, 0)


def share_of(batch: TensorDict, dp_rank: int, dp_size: int, *, balance: bool) -> tuple[TensorDict, int]:
    """A data-parallel rank's rows, as many on every rank, and the number of trained tokens in the whole batch."""
    images = images_of(batch)
    columns = {} if images is None else {IMAGES: object_array(images)}
    plain = DataProto(batch.exclude(IMAGES), columns)
    laid_out = lay_out(plain, MiniBatches(len(batch)), dp_size, balance=balance)
    (counts,) = laid_out.meta_info["mini_batches"]
    rows = with_images(laid_out).exclude("mini_batch")
    per_rank = len(rows) // dp_size
    return rows[dp_rank * per_rank : (dp_rank + 1) * per_rank], counts["batch_num_tokens"]


def collate_pairs(samples: Sequence[dict[str, Any]]) -> TensorDict:
    """Two rows per pair, with `is_data` 1 and the numbers of the samples: one per pair goes to both rows, two to one each."""
    batch = collate([sample[side] for sample in samples for side in ("chosen", "rejected")])
    batch["is_data"] = torch.ones(len(batch))
    for name in samples[0].keys() - {"chosen", "rejected"}:
        batch[name] = torch.stack([sample[name].expand(2) for sample in samples]).flatten()
    return batch


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the chosen and of the rejected answers, from those of all rows."""
    return values[0::2], values[1::2]


def share_of_pairs(batch: TensorDict, dp_rank: int, dp_size: int, *, balance: bool) -> tuple[TensorDict, int]:
    """A data-parallel rank's rows, as many on every rank, and the number of pairs in the whole batch.

    If the pairs do not divide, ranks are filled up with pairs of one token each and `is_data` 0.
    """
    lengths = batch["attention_mask"].sum(-1).view(-1, 2).sum(-1).tolist()
    parts = spread(lengths, dp_size, balance=balance)
    own = parts[dp_rank]
    missing = max(map(len, parts)) - len(own)
    rows = batch[[2 * pair + side for pair in [*own, *[0] * missing] for side in (0, 1)]]
    is_padding = torch.arange(len(rows)) >= 2 * len(own)
    clear_rows(rows, is_padding)
    if (images := images_of(rows)) is not None:
        rows[IMAGES] = image_column([None if padding else image for image, padding in zip(images, is_padding.tolist())])
    rows["is_data"] = rows["is_data"].masked_fill(is_padding, 0)
    return rows, len(lengths)
