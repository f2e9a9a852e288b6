"""Rows of a batch (left-padded prompt + right-padded response) as the tokens of one forward pass.

row b:   pad pad p1 p2 p3 | r1 r2 pad        position of r1's prediction is p3, of r2's is r1
packed:  p1 p2 p3 r1 r2 p1 p2 r1 …           one row of T tokens, no padding
shared:  rank s of a sequence group holds tokens [s T/size, (s+1) T/size) of the packed row
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from lockstep.models.attention import AttentionContext, PackedAttention, PaddedAttention
from lockstep.models.ulysses import SequenceGroup, UlyssesAttention


@dataclass(frozen=True)
class ForwardRows:
    """What one forward pass computes and where its results go.

    input_ids:      (1, T) packed or (B, L) padded.
    position_ids:   same shape; each token's place in its own sequence.
    context:        what each token may attend to.
    predicts:       (N) index into the flattened hidden states: the place that predicts response token n.
    targets:        (N) the response tokens themselves.
    row, column:    (N) where result n belongs in a (B, R) tensor.
    last:           (M) index into the flattened hidden states of a sequence's last token.
    last_row:       (M) the row of that sequence; all B rows in order, unless `sequence` shares them out.
    shape:          (B, R).
    sequence:       the ranks that share the packed row; the tokens and results here are then those of this rank's slice.
    """

    input_ids: Tensor
    position_ids: Tensor
    context: AttentionContext
    predicts: Tensor
    targets: Tensor
    row: Tensor
    column: Tensor
    last: Tensor
    last_row: Tensor
    shape: tuple[int, int]
    sequence: SequenceGroup | None = None

    def spread(self, values: Tensor) -> Tensor:
        """(N) results -> (B, R), zero where there is none."""
        return self._whole(values.new_zeros(self.shape).index_put((self.row, self.column), values))

    def spread_last(self, values: Tensor) -> Tensor:
        """(M) results at last tokens -> (B)."""
        return self._whole(values.new_zeros(self.shape[0]).index_put((self.last_row,), values))

    def _whole(self, values: Tensor) -> Tensor:
        return values if self.sequence is None else self.sequence.sum(values)

    def to(self, device: torch.device) -> "ForwardRows":
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def sequence_lengths(batch: TensorDict) -> list[int]:
    lengths: list[int] = batch["attention_mask"].sum(-1).tolist()
    return lengths


def forward_rows(
    batch: TensorDict, device: torch.device, *, packed: bool, sequence: SequenceGroup | None = None
) -> ForwardRows:
    """Lay out the rows of `batch` (on the host) for `device`; only places with response_mask 1 are predicted.

    sequence: ranks that share the packed row; each of them is given the same rows and gets a slice of their tokens.
    """
    input_ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    num_rows, length = input_ids.shape
    width = batch["responses"].shape[1]
    row, column = batch["response_mask"].bool().nonzero(as_tuple=True)
    place = column + (length - width)  # of the response token in its padded row
    flat = torch.arange(num_rows * length).view(num_rows, length)
    ends = (flat * mask).amax(-1)
    context: AttentionContext
    if packed:
        order = mask.flatten().cumsum(0) - 1  # padded place -> packed place
        predicts, last = order[flat[row, place - 1]], order[ends]
        tokens, positions = input_ids[mask][None], batch["position_ids"][mask][None]
        context = PackedAttention(sequence_lengths(batch), device)
    else:
        predicts, last = flat[row, place - 1], ends
        tokens, positions = input_ids, batch["position_ids"]
        context = PaddedAttention(mask.to(device))
    targets, last_row, shape = input_ids[row, place], torch.arange(num_rows), (num_rows, width)
    rows = ForwardRows(tokens, positions, context, predicts, targets, row, column, last, last_row, shape)
    if sequence is not None:
        rows = _slice_of(rows, sequence_lengths(batch), sequence, device)
    return rows.to(device)


def _slice_of(rows: ForwardRows, lengths: list[int], sequence: SequenceGroup, device: torch.device) -> ForwardRows:
    """This rank's tokens of a packed row, and the predictions and last tokens among them.

    The row is filled up to a multiple of the group's size with sequences of one token, which see and predict nothing else.
    """
    num_tokens = rows.input_ids.shape[1]
    missing = -num_tokens % sequence.size
    share = (num_tokens + missing) // sequence.size
    start = sequence.rank * share
    predicted = (rows.predicts >= start) & (rows.predicts < start + share)
    ended = (rows.last >= start) & (rows.last < start + share)
    return ForwardRows(
        input_ids=F.pad(rows.input_ids, (0, missing))[:, start : start + share],
        position_ids=F.pad(rows.position_ids, (0, missing))[:, start : start + share],
        context=UlyssesAttention(PackedAttention([*lengths, *[1] * missing], device), sequence),
        predicts=rows.predicts[predicted] - start,
        targets=rows.targets[predicted],
        row=rows.row[predicted],
        column=rows.column[predicted],
        last=rows.last[ended] - start,
        last_row=rows.last_row[ended],
        shape=rows.shape,
        sequence=sequence,
    )
