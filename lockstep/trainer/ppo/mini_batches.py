"""Mini-batches are cut here, on the controller, so that they do not depend on how many workers there are.

    rows of a step ─► mini-batches ─► each one's rows spread over the data-parallel ranks ─► one batch whose
                                                                                             r-th part is rank r's

What a loss must know of its whole mini-batch (counts, and what `prepare_policy_loss` gives) is settled here too. Every rank
gets equally many rows of every mini-batch; where they do not divide, rows are added that hold one token and weigh nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.models.packing import prompt_owners
from lockstep.protocol import DataProto
from lockstep.utils.seqlen import get_group_balanced_partitions, get_seqlen_balanced_partitions

Prepare = Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]
"""(rows of a mini-batch, its number) -> further columns for its loss."""


@dataclass(frozen=True)
class MiniBatches:
    """How a step's rows are taken.

    size:    rows in one mini-batch; the last one of a pass may be smaller.
    epochs:  passes over the rows.
    seed:    of the shuffling before each pass; None keeps the order, so that every pass has the same mini-batches.
    prepare: what a loss needs beside its rows; None for nothing.
    """

    size: int
    epochs: int = 1
    seed: int | None = None
    prepare: Prepare | None = None

    def cut(self, num_rows: int) -> Iterator[list[int]]:
        """The mini-batches of all passes that differ."""
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        for _ in range(self.num_passes):
            order = range(num_rows) if generator is None else torch.randperm(num_rows, generator=generator).tolist()
            for start in range(0, num_rows, self.size):
                yield list(order[start : start + self.size])

    @property
    def num_passes(self) -> int:
        return 1 if self.seed is None and self.prepare is None else self.epochs


def lay_out(batch: DataProto, rule: MiniBatches, dp_size: int, *, balance: bool) -> DataProto:
    """The tensors of the batch for an update: row key `mini_batch`; meta_info `mini_batches` (counts of each), `num_repeats` (how
    often all of them are taken), `prepared` (names of what `rule.prepare` added).

    balance: give ranks rows of about the same number of tokens, rather than as they follow each other.
    """
    lengths, owners = [1] * len(batch), [0] * len(batch)  # one rank takes all rows as they are
    if dp_size > 1:
        lengths, owners = _lengths_and_owners(batch)
    taken: list[int] = []  # the rows of all mini-batches, one after another
    number_of: list[int] = []  # the mini-batch of each
    counts: list[dict[str, int]] = []
    prepared: list[dict[str, Tensor]] = []
    shares: list[list[int]] = [[] for _ in range(dp_size)]  # places in `taken`
    padding: list[list[bool]] = [[] for _ in range(dp_size)]
    num_tokens = batch.tensors["response_mask"].numpy().sum(-1)
    for number, rows in enumerate(rule.cut(len(batch))):
        trained = num_tokens[rows]
        counts.append({"batch_num_tokens": int(trained.sum()), "global_batch_size": int((trained > 0).sum())})
        if rule.prepare is not None:
            prepared.append(rule.prepare(batch.tensors[rows], number))
        parts = spread([lengths[i] for i in rows], dp_size, balance=balance, owners=[owners[i] for i in rows])
        width, start = max(map(len, parts)), len(taken)
        for share, marks, part in zip(shares, padding, parts):
            num_added = width - len(part)
            share += [start + i for i in part] + [start] * num_added
            marks += [False] * len(part) + [True] * num_added
        taken += rows
        number_of += [number] * len(rows)
    places = torch.tensor(list(chain.from_iterable(shares)))
    tensors = {"mini_batch": torch.tensor(number_of)[places]}
    names = sorted(prepared[0]) if prepared else []
    tensors |= {name: torch.cat([columns[name] for columns in prepared])[places] for name in names}
    order = torch.tensor(taken)[places]
    is_as_it_was = torch.equal(order, torch.arange(len(batch)))
    laid_out = batch.select(None, [])
    laid_out = (laid_out if is_as_it_was else laid_out.select_idxs(order)).union(DataProto.from_dict(tensors=tensors))
    _empty_rows(laid_out, torch.tensor(list(chain.from_iterable(padding))))
    num_repeats = rule.epochs // rule.num_passes
    laid_out.meta_info |= {"mini_batches": counts, "num_repeats": num_repeats, "prepared": names}
    return laid_out


def spread(lengths: list[int], num_parts: int, *, balance: bool, owners: list[int] | None = None) -> list[list[int]]:
    """Indices for each part: of near-equal sums with `balance`, else as they follow each other; some empty where there are few.

    owners: rows of one owner have the same prompt, and stay together where there are enough prompts.
    """
    if num_parts == 1:
        return [list(range(len(lengths)))]
    if balance and owners is not None and len(set(owners)) >= num_parts:
        parts = get_group_balanced_partitions(lengths, owners, num_parts)
        if max(map(len, parts)) <= 1.1 * len(lengths) / num_parts:  # else padding costs more than sharing saves
            return parts
    if balance and len(lengths) >= num_parts:
        return get_seqlen_balanced_partitions(lengths, num_parts, equal_size=len(lengths) % num_parts == 0)
    return [part.tolist() for part in np.array_split(np.arange(len(lengths)), num_parts)]


def _lengths_and_owners(batch: DataProto) -> tuple[list[int], list[int]]:
    """Tokens of each row, and the first row with the same prompt."""
    mask, ids = batch.tensors["attention_mask"].numpy().astype(bool), batch.tensors["input_ids"].numpy()
    start = ids.shape[1] - batch.tensors["responses"].shape[1]
    return mask.sum(-1).tolist(), prompt_owners(ids, mask, start)


def call_balanced(method: Callable[[DataProto], Any], batch: DataProto, num_parts: int) -> Callable[[], DataProto]:
    """Begin a call that gives one row for each row, its ranks having about equally many tokens; returns how to wait for it.

    The rows come back in the order of `batch`.
    """
    if num_parts == 1 or len(batch) % num_parts:
        future = method(batch)
        return lambda: future.get()
    lengths, owners = _lengths_and_owners(batch)
    parts = spread(lengths, num_parts, balance=True, owners=owners)
    if len({len(part) for part in parts}) > 1:  # dispatch cuts parts of equal size
        parts = get_seqlen_balanced_partitions(lengths, num_parts, equal_size=True)
    order = np.concatenate(parts)
    future = method(batch.select_idxs(order))
    return lambda: future.get().select_idxs(np.argsort(order))


def _empty_rows(batch: DataProto, which: Tensor) -> None:
    """Leave the first token of each of these rows, and nothing that it could predict."""
    if not which.any():
        return
    mask = batch.tensors["attention_mask"].clone()
    first = (mask.cumsum(1) == 1) & mask.bool()
    mask[which] = first[which].to(mask.dtype)
    batch.tensors["attention_mask"] = mask
    batch.tensors["response_mask"] = batch.tensors["response_mask"].masked_fill(which[:, None], 0)
