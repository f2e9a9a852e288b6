"""Rows of a batch (left-padded prompt + right-padded response) as the tokens of one forward pass.

row b:   pad pad p1 p2 p3 | r1 r2 pad        p3 predicts r1, r1 predicts r2
packed:  p1 p2 p3 r1 r2 s1 s2 q1 q2 t1 …     one row of T tokens without padding; a prompt shared by several rows is there once
padded:  the rows as they are
aligned: p1 p2 p3 r1 r2 r2        padded on the right, for models that attend by themselves: a causal model cannot see later tokens
rows:    one row at a time without padding, as the reference
sliced:  rank s of a sequence group holds tokens [s T/size, (s+1) T/size) of the packed row
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from lockstep.models.attention import AttentionContext, PackedAttention, PaddedAttention
from lockstep.models.ulysses import SequenceGroup, UlyssesAttention
from lockstep.protocol.tokens import first_alike
from lockstep.utils.device import to_device

Layout = Literal["packed", "padded", "aligned", "rows"]


@dataclass(frozen=True)
class ForwardRows:
    """What one forward pass computes and where its results go.

    input_ids:      (1, T) packed (also for rows), or (B, L) padded or aligned.
    position_ids:   same shape; each token's position in its own sequence.
    context:        what each token may attend to; None for aligned and rows, which the model attends by itself.
    lengths:        tokens of each row in input_ids, for rows.
    predicts:       (N) index into the flattened hidden states: the place that predicts response token n.
    targets:        (N) the response tokens themselves.
    row, column:    (N) where result n belongs in a (B, R) tensor.
    last:           (M) index into the flattened hidden states of a sequence's last token.
    last_row:       (M) the row of that sequence; all B rows in order, unless `sequence` splits them over ranks.
    shape:          (B, R).
    routes:         (T, L, K) the experts of each token by the column `routed_experts` (`models/router_replay.py`), if there is one.
    places:         (B, S) index into the flattened hidden states of the token at each position of a row, -1 if there is none;
                    only if asked for.
    sequence:       the ranks that share the packed row; the tokens and results here are then this rank's slice.
    """

    input_ids: Tensor
    position_ids: Tensor
    context: AttentionContext | None
    predicts: Tensor
    targets: Tensor
    row: Tensor
    column: Tensor
    last: Tensor
    last_row: Tensor
    shape: tuple[int, int]
    lengths: tuple[int, ...] = ()
    routes: Tensor | None = None
    places: Tensor | None = None
    sequence: SequenceGroup | None = None

    def own_batches(self) -> tuple[Tensor, ...]:
        """The tokens of each call of a model's own forward: (1, L) of each row, or (B, L) aligned."""
        return self.input_ids.split(self.lengths, 1) if self.lengths else (self.input_ids,)

    def spread(self, values: Tensor) -> Tensor:
        """(N) results -> (B, R), zero elsewhere."""
        return self.whole(values.new_zeros(self.shape).index_put((self.row, self.column), values))

    def spread_last(self, values: Tensor) -> Tensor:
        """(M) results at last tokens -> (B)."""
        return self.whole(values.new_zeros(self.shape[0]).index_put((self.last_row,), values))

    def by_position(self, values: Tensor) -> Tensor:
        """Integers (T, …) of all tokens -> (B, S, …) by row and position, -1 where a row has no token."""
        assert self.places is not None
        is_here = self.places >= 0
        found = (values + 1)[self.places.clamp_min(0)] * is_here.view(*is_here.shape, *[1] * (values.ndim - 1))
        return self.whole(found) - 1

    def whole(self, values: Tensor) -> Tensor:
        """The sum over the ranks that share the rows."""
        return values if self.sequence is None else self.sequence.sum(values)

    def to(self, device: torch.device) -> "ForwardRows":
        moved: dict[str, Any] = {
            name: to_device(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def forward_rows(
    batch: TensorDict,
    device: torch.device,
    layout: Layout,
    sequence: SequenceGroup | None = None,
    *,
    with_places: bool = False,
) -> ForwardRows:
    """Lay out the rows of `batch` (on the host) for `device`; only places with response_mask 1 are predicted.

    sequence: ranks that share the packed row; each gets the same rows and a slice of their tokens.
    with_places: for `ForwardRows.by_position`.
    """
    input_ids, position_ids = batch["input_ids"].numpy(), batch["position_ids"].numpy()
    mask = batch["attention_mask"].numpy().astype(bool)
    num_rows, length = input_ids.shape
    width = batch["responses"].shape[1]
    row, column = batch["response_mask"].numpy().nonzero()
    place = column + (length - width)  # of the response token in its padded row
    every = np.arange(num_rows)
    end = (np.arange(length) * mask).max(-1)
    arrays = {"targets": input_ids[row, place], "row": row, "column": column, "last_row": every}
    context: AttentionContext | None = None
    if layout == "aligned":
        order = (~mask).argsort(1, kind="stable")[:, : mask.sum(-1).max()]
        ids = np.take_along_axis(input_ids, order, 1)
        kept = np.take_along_axis(mask, order, 1)
        arrays["input_ids"] = np.where(kept, ids, input_ids[every, end, None])  # as for padded rows
        arrays["position_ids"] = np.broadcast_to(np.arange(order.shape[1]), order.shape).copy()
        first = every * order.shape[1] - 1
        at = mask.cumsum(1)  # number of tokens of the row up to each place
        arrays |= {"predicts": first[row] + at[row, place - 1], "last": first + at[every, end]}
    elif layout != "padded":
        pack = _Pack(input_ids, mask, length - width, share_prompts=layout == "packed")
        arrays |= {"input_ids": input_ids[pack.kept][None], "position_ids": position_ids[pack.kept][None]}
        arrays |= {"predicts": pack.index(row, place - 1), "last": pack.index(every, end)}
        if layout == "packed":
            context = PackedAttention(pack.lengths, device, pack.prefixes)
    else:
        # padding repeats the last token: the embedding of a pad token may be zero, which some norms divide by
        arrays |= {"input_ids": np.where(mask, input_ids, input_ids[every, end, None]), "position_ids": position_ids}
        arrays |= {"predicts": row * length + place - 1, "last": every * length + end}
        context = PaddedAttention(torch.from_numpy(mask).to(device))
    has_routes = "routed_experts" in batch.keys() and batch["routed_experts"].numel()  # noqa: SIM118 - a TensorDict
    if has_routes and layout != "aligned":
        routes = batch["routed_experts"].numpy()[every[:, None], position_ids]  # (B, L, layers, K)
        routes[~mask] = -1
        arrays["routes"] = routes[pack.kept] if layout != "padded" else routes.reshape(-1, *routes.shape[2:])
    if with_places and layout != "aligned":
        at_row, at_place = mask.nonzero()
        places = np.full((num_rows, int(mask.sum(-1).max())), -1)
        index = pack.index(at_row, at_place) if layout != "padded" else at_row * length + at_place
        places[at_row, position_ids[at_row, at_place]] = index
        arrays["places"] = places
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    lengths = tuple(pack.lengths) if layout == "rows" else ()
    rows = ForwardRows(**tensors, context=context, shape=(num_rows, width), lengths=lengths)
    if layout == "packed" and sequence is not None:
        rows = _slice_of(rows, pack, sequence, device)
    return rows.to(device)


class _Pack:
    """The tokens of a packed row. A prompt shared by several rows is kept once, in the first of them.

    kept:     (B, L) tokens that are in the packed row, row by row.
    lengths:  number of kept tokens of each row.
    prefixes: (start, length) of a row's prompt if it is kept in another row; None if no prompt is shared.
    """

    def __init__(self, input_ids: np.ndarray, mask: np.ndarray, prompt_length: int, share_prompts: bool) -> None:
        self.prompt_length = prompt_length
        owners: Sequence[int] = range(len(mask))
        if share_prompts:
            prompts = np.where(mask[:, :prompt_length], input_ids[:, :prompt_length], -1)
            owners = first_alike((row.tobytes() for row in prompts), mask[:, prompt_length:].sum(-1).tolist())
        self.owner = np.array(owners)
        shares = self.owner != np.arange(len(mask))
        self.kept = mask.copy()
        self.kept[shares, :prompt_length] = False
        self._place = (self.kept.ravel().cumsum() - 1).reshape(mask.shape)
        self.lengths: list[int] = self.kept.sum(-1).tolist()
        self.prefixes: list[tuple[int, int]] | None = None
        if shares.any():
            before = mask[:, :prompt_length].sum(-1) * shares
            start = self._place[self.owner, prompt_length - 1] + 1 - before
            self.prefixes = [(s, n) if n else (0, 0) for s, n in zip(start.tolist(), before.tolist())]

    def index(self, row: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Index in the packed row of the token at a place of a padded row."""
        found: np.ndarray = self._place[np.where(place < self.prompt_length, self.owner[row], row), place]
        return found


def _slice_of(rows: ForwardRows, pack: _Pack, sequence: SequenceGroup, device: torch.device) -> ForwardRows:
    """This rank's tokens of a packed row, and the predictions and last tokens among them.

    The row is padded to a multiple of the group's size with sequences of one token, which predict nothing.
    """
    num_tokens = rows.input_ids.shape[1]
    missing = -num_tokens % sequence.size
    share = (num_tokens + missing) // sequence.size
    start = sequence.rank * share
    prefixes = None if pack.prefixes is None else [*pack.prefixes, *[(0, 0)] * missing]
    whole = PackedAttention([*pack.lengths, *[1] * missing], device, prefixes)
    predicted = (rows.predicts >= start) & (rows.predicts < start + share)
    ended = (rows.last >= start) & (rows.last < start + share)
    routes = places = None
    if rows.routes is not None:
        routes = F.pad(rows.routes, (0, 0, 0, 0, 0, missing), value=-1)[start : start + share]
    if rows.places is not None:
        is_here = (rows.places >= start) & (rows.places < start + share)
        places = torch.where(is_here, rows.places - start, -1)
    return ForwardRows(
        input_ids=F.pad(rows.input_ids, (0, missing))[:, start : start + share],
        position_ids=F.pad(rows.position_ids, (0, missing))[:, start : start + share],
        context=UlyssesAttention(whole, sequence),
        predicts=rows.predicts[predicted] - start,
        targets=rows.targets[predicted],
        row=rows.row[predicted],
        column=rows.column[predicted],
        last=rows.last[ended] - start,
        last_row=rows.last_row[ended],
        shape=rows.shape,
        routes=routes,
        places=places,
        sequence=sequence,
    )
