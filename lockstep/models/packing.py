"""Rows of a batch (left-padded prompt + right-padded response) as the tokens of one forward pass.

row b:   pad pad p1 p2 p3 | r1 r2 pad        position of r1's prediction is p3, of r2's is r1
packed:  p1 p2 p3 r1 r2 p1 p2 r1 …           one row of T tokens, no padding
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.models.attention import AttentionContext, PackedAttention, PaddedAttention


@dataclass(frozen=True)
class ForwardRows:
    """What one forward pass computes and where its results go.

    input_ids:      (1, T) packed or (B, L) padded.
    position_ids:   same shape; each token's place in its own sequence.
    context:        what each token may attend to.
    predicts:       (N) index into the flattened hidden states: the place that predicts response token n.
    targets:        (N) the response tokens themselves.
    row, column:    (N) where result n belongs in a (B, R) tensor.
    last:           (B) index into the flattened hidden states of each sequence's last token.
    shape:          (B, R).
    """

    input_ids: Tensor
    position_ids: Tensor
    context: AttentionContext
    predicts: Tensor
    targets: Tensor
    row: Tensor
    column: Tensor
    last: Tensor
    shape: tuple[int, int]

    def spread(self, values: Tensor) -> Tensor:
        """(N) results -> (B, R), zero where there is none."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)


def sequence_lengths(batch: TensorDict) -> list[int]:
    lengths: list[int] = batch["attention_mask"].sum(-1).tolist()
    return lengths


def forward_rows(batch: TensorDict, device: torch.device, *, packed: bool) -> ForwardRows:
    """Lay out the rows of `batch` (on the host) for `device`; only places with response_mask 1 are predicted."""
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
    targets = input_ids[row, place]
    moved = [t.to(device, non_blocking=True) for t in (tokens, positions, predicts, targets, row, column, last)]
    tokens, positions, predicts, targets, row, column, last = moved
    return ForwardRows(tokens, positions, context, predicts, targets, row, column, last, (num_rows, width))
