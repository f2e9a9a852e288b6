"""Mini-batches are formed here, on the controller, so that they do not depend on the number of workers.

    rows of a step ─► mini-batches ─► rows of each one distributed over the data-parallel ranks ─► one batch whose
                                                                                                   r-th part is rank r's

A mini-batch counts conversations: all rows of one are in it (see `forks`). Mini-batch statistics for the loss (counts, and the
result of `prepare_policy_loss`) are computed here too. Every rank gets the same number of rows of every mini-batch; padding rows
with one token and no loss are added if they do not divide.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.losses.policy import policy_loss_mode, preparation_of, prepare_policy_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.critic import CriticConfig
from lockstep.protocol import DataProto
from lockstep.protocol.columns import Batch, names_of
from lockstep.protocol.ragged import Ragged, is_ragged
from lockstep.protocol.tokens import image_keys, lengths_of, prompt_owners, row_sums, with_images
from lockstep.trainer.ppo.forks import OWNER, rows_of
from lockstep.utils.seqlen import get_group_balanced_partitions, get_seqlen_balanced_partitions

Prepare = Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]
"""(rows of a mini-batch, its number) -> extra columns for its loss."""


@dataclass(frozen=True)
class MiniBatches:
    """How a step's rows are split into mini-batches.

    size:    conversations per mini-batch; the last one of a pass may be smaller.
    epochs:  passes over the rows.
    seed:    for shuffling before each pass; None keeps the order, so that every pass has the same mini-batches.
    prepare: computes extra columns for the loss; None if it needs none.
    """

    size: int
    epochs: int = 1
    seed: int | None = None
    prepare: Prepare | None = None

    def split(self, num_rows: int) -> Iterator[list[int]]:
        """The numbers below `num_rows` in mini-batches, over all distinct passes."""
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        for _ in range(self.num_passes):
            order = range(num_rows) if generator is None else torch.randperm(num_rows, generator=generator).tolist()
            for start in range(0, num_rows, self.size):
                yield list(order[start : start + self.size])

    @property
    def num_passes(self) -> int:
        return 1 if self.seed is None and self.prepare is None else self.epochs


def mini_batches_of(
    section: ActorConfig | CriticConfig, num_samples: int, step: int, prepare: Prepare | None = None
) -> MiniBatches:
    """The mini-batches that a section of the config asks for in a step. num_samples: per prompt (`rollout.n`)."""
    seed = section.data_loader_seed + step if section.shuffle else None
    return MiniBatches(section.ppo_mini_batch_size * num_samples, section.ppo_epochs, seed, prepare)


def loss_preparation(actor: ActorConfig, step: int) -> Prepare | None:
    """`prepare` of the actor's loss; None if it needs none."""
    mode = policy_loss_mode(actor)
    if preparation_of(mode) is None:
        return None
    return lambda rows, number: prepare_policy_loss(mode, rows, actor, seed=(step << 16) + number)


def lay_out(batch: DataProto, rule: MiniBatches, dp_size: int, *, balance: bool) -> DataProto:
    """The tensors of the batch, ordered for an update: row key `mini_batch`; meta_info `mini_batches` (counts of each),
    `num_repeats` (passes over them), `prepared` (columns added by `rule.prepare`).

    balance: balance the tokens per rank instead of splitting the rows in order.
    """
    lengths, owners = [1] * len(batch), [0] * len(batch)  # unused: a single rank takes all rows
    if dp_size > 1:
        lengths, owners = _lengths_and_owners(batch)
    rows_in_order: list[int] = []  # rows of all mini-batches, concatenated
    number_of: list[int] = []  # the mini-batch of each
    counts: list[dict[str, int]] = []
    prepared: list[dict[str, Tensor]] = []
    per_rank: list[list[int]] = [[] for _ in range(dp_size)]  # positions in `rows_in_order`
    padding: list[list[bool]] = [[] for _ in range(dp_size)]
    num_tokens = row_sums(batch.tensors, "response_mask").numpy()
    of_conversation = rows_of(batch)
    for number, chosen in enumerate(rule.split(len(of_conversation))):
        rows = [row for conversation in chosen for row in of_conversation[conversation]]
        tokens = num_tokens[rows]
        counts.append({"batch_num_tokens": int(tokens.sum()), "global_batch_size": int((tokens > 0).sum())})
        if rule.prepare is not None:
            prepared.append(rule.prepare(batch.tensors[rows], number))
        parts = spread([lengths[i] for i in rows], dp_size, balance=balance, owners=[owners[i] for i in rows])
        width, start = max(map(len, parts)), len(rows_in_order)
        for positions_of_rank, is_padding, part in zip(per_rank, padding, parts):
            num_added = width - len(part)
            positions_of_rank += [start + i for i in part] + [start] * num_added
            is_padding += [False] * len(part) + [True] * num_added
        rows_in_order += rows
        number_of += [number] * len(rows)
    positions = torch.tensor(list(chain.from_iterable(per_rank)))
    tensors = {"mini_batch": torch.tensor(number_of)[positions]}
    names = sorted(prepared[0]) if prepared else []
    tensors |= {name: torch.cat([columns[name] for columns in prepared])[positions] for name in names}
    order = torch.tensor(rows_in_order)[positions]
    is_padding_row = list(chain.from_iterable(padding))
    laid_out = batch.select([name for name in names_of(batch.batch) if name != OWNER], [])
    laid_out = _in_order(laid_out, order, is_padding_row).union(DataProto.from_dict(tensors=tensors))
    for name in image_keys(batch):
        images = batch.non_tensor_batch[name][order.numpy()]
        images[is_padding_row] = None
        laid_out.non_tensor_batch[name] = images
    num_repeats = rule.epochs // rule.num_passes
    laid_out.meta_info |= {"mini_batches": counts, "num_repeats": num_repeats, "prepared": names}
    return laid_out


def _in_order(batch: DataProto, order: Tensor, is_padding: list[bool]) -> DataProto:
    """The rows in this order, padding rows reduced to one token."""
    if is_ragged(batch.batch) and any(is_padding):
        is_plain = batch.batch.tokens() is not None and isinstance(batch.batch.stored("response_mask"), Ragged)
        if is_plain:
            return DataProto(batch.batch.take_or_clear(order.tolist(), is_padding), meta_info=dict(batch.meta_info))
        batch = DataProto(batch.batch.to_tensordict(), meta_info=dict(batch.meta_info))  # a program changed its tokens
    if not torch.equal(order, torch.arange(len(batch))):
        batch = batch.select_idxs(order)
    clear_rows(batch.tensors, torch.tensor(is_padding))
    return batch


def spread(lengths: list[int], num_parts: int, *, balance: bool, owners: list[int] | None = None) -> list[list[int]]:
    """Row indices of each part: balanced by length with `balance`, else in order; parts may be empty if there are few rows.

    owners: rows with the same owner share a prompt, and stay together if there are enough prompts.
    """
    if num_parts == 1:
        return [list(range(len(lengths)))]
    if balance and owners is not None and len(set(owners)) >= num_parts:
        parts = get_group_balanced_partitions(lengths, owners, num_parts)
        if (
            max(map(len, parts)) <= 1.1 * len(lengths) / num_parts
        ):  # else padding rows cost more than shared prompts save
            return parts
    if balance and len(lengths) >= num_parts:
        return get_seqlen_balanced_partitions(lengths, num_parts, equal_size=len(lengths) % num_parts == 0)
    return [part.tolist() for part in np.array_split(np.arange(len(lengths)), num_parts)]


def _lengths_and_owners(batch: DataProto) -> tuple[list[int], list[int]]:
    """Number of tokens of each row, and the first row with the same prompt."""
    prompts, responses = lengths_of(batch.tensors)
    return (prompts + responses).tolist(), prompt_owners(with_images(batch))


@dataclass(frozen=True)
class Balanced:
    """Rows in an order whose equal parts have similar numbers of tokens.

    order: the rows of the batch they are; None for the batch's own order.
    """

    rows: DataProto
    order: np.ndarray | None = None

    @classmethod
    def over(cls, batch: DataProto, num_parts: int) -> "Balanced":
        if num_parts == 1 or len(batch) % num_parts:
            return cls(batch)
        lengths, owners = _lengths_and_owners(batch)
        parts = spread(lengths, num_parts, balance=True, owners=owners)
        if len({len(part) for part in parts}) > 1:  # dispatch splits into equal parts
            parts = get_seqlen_balanced_partitions(lengths, num_parts, equal_size=True)
        order = np.concatenate(parts)
        return cls(batch.select_idxs(order), order)

    def call(self, method: Callable[[DataProto], Any]) -> Callable[[], DataProto]:
        """Start a row-wise worker call; returns a function that waits for the result, in the batch's own order."""
        future = method(self.rows)
        if self.order is None:
            return lambda: future.get()
        back = np.argsort(self.order)
        return lambda: future.get().select_idxs(back)


def clear_rows(rows: Batch, which: Tensor) -> None:
    """Reduce these rows to their first token, with an empty response mask."""
    if not which.any():
        return
    mask = rows["attention_mask"].clone()
    first = (mask.cumsum(1) == 1) & mask.bool()
    mask[which] = first[which].to(mask.dtype)
    rows["attention_mask"] = mask
    rows["response_mask"] = rows["response_mask"].masked_fill(which[:, None], 0)
