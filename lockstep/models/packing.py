"""Rows of a batch (left-padded prompt + right-padded response) as the tokens of one forward pass.

row b:   pad pad p1 p2 p3 | r1 r2 pad        p3 predicts r1, r1 predicts r2
packed:  p1 p2 p3 r1 r2 s1 s2 q1 q2 t1 …     one row of T tokens without padding; a prompt shared by several rows is there once
padded:  the rows as they are
aligned: p1 p2 p3 r1 r2 r2        padded on the right, for models that attend by themselves: a causal model cannot see later tokens
rows:    one row at a time without padding, as the reference
sliced:  rank s of a sequence group holds tokens [s T/size, (s+1) T/size) of the packed row
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from lockstep.models.attention import AttentionContext, PackedAttention, PaddedAttention
from lockstep.models.placeholders import tokens_among
from lockstep.models.ulysses import SequenceGroup, UlyssesAttention
from lockstep.protocol.images import ImageInputs, check_placeholders, is_placeholder, with_content
from lockstep.protocol.tokens import first_alike, images_of
from lockstep.utils.device import to_device

Layout = Literal["packed", "padded", "aligned", "rows"]
RopePositions = Callable[[Sequence[int], ImageInputs], Tensor | None]
"""(tokens of a row, its images) -> (3, L) positions, or None for 0..L-1."""


@dataclass(frozen=True)
class ForwardRows:
    """What one forward pass computes and where its results go.

    input_ids:      (1, T) packed (also for rows), or (B, L) padded or aligned.
    position_ids:   same shape; each token's position in its own sequence; (3, 1, T) or (3, B, L) if images give tokens positions
                    in time, height and width.
    context:        what each token may attend to; None for aligned and rows, which the model attends by itself.
    lengths:        tokens of each row in input_ids, for rows.
    predicts:       (N) index into the flattened hidden states: the place that predicts response token n.
    targets:        (N) the response tokens themselves.
    row, column:    (N) where result n belongs in a (B, R) tensor.
    last:           (M) index into the flattened hidden states of a sequence's last token.
    last_row:       (M) the row of that sequence; all B rows in order, unless `sequence` splits them over ranks.
    shape:          (B, R).
    routes:         (T, L, K) the experts of each token by the column `routed_experts` (`models/router_replay.py`), if there is one.
    images:         the images of the rows, each once; None if the batch has no column of images.
    features:       (P,) for each placeholder token in input_ids, its feature among those of `images`.
    placeholders:   the placeholder tokens, if there are images.
    row_images:     the images of each row, for rows.
    row_prompts:    tokens of each row's prompt, for rows.
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
    images: tuple[ImageInputs, ...] | None = None
    features: Tensor | None = None
    placeholders: tuple[int, ...] = ()
    row_images: tuple[ImageInputs | None, ...] = ()
    row_prompts: tuple[int, ...] = ()

    def own_batches(self) -> Iterator[tuple[Tensor, ImageInputs | None, int]]:
        """The tokens of each call of a model's own forward: (1, L) of a row, its images and prompt's length, or (B, L) aligned."""
        if not self.lengths:
            return iter([(self.input_ids, None, 0)])
        return zip(self.input_ids.split(self.lengths, 1), self.row_images, self.row_prompts)

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
    rope: RopePositions | None = None,
    with_places: bool = False,
) -> ForwardRows:
    """Lay out the rows of `batch` (on the host) for `device`; only places with response_mask 1 are predicted.

    sequence: ranks that share the packed row; each gets the same rows and a slice of their tokens.
    rope: positions of rows with images, if the model has its own.
    with_places: for `ForwardRows.by_position`.
    """
    images = images_of(batch)
    has_images = images is not None and any(image is not None for image in images)
    if has_images and layout == "aligned":
        layout = "rows"  # each row has its own image tensors
    tokens = _Tokens.of(batch)
    if has_images:
        assert images is not None
        tokens = _with_images(tokens, images, rope)
    num_rows, length = tokens.mask.shape
    width = batch["responses"].shape[1]
    laid = _laid_out(tokens, length - width, layout, device)
    every = np.arange(num_rows)
    row, column = batch["response_mask"].numpy().nonzero()
    place = column + (length - width)  # of the response token in its padded row
    arrays = {
        "input_ids": laid.input_ids,
        "position_ids": laid.position_ids,
        "predicts": laid.index(row, place - 1),
        "targets": tokens.input_ids[row, place],
        "row": row,
        "column": column,
        "last": laid.index(every, tokens.end),
        "last_row": every,
    }
    if layout != "aligned":
        arrays |= _routes(batch, tokens.mask, laid) | (_places(batch, tokens.mask, laid) if with_places else {})
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    rows = ForwardRows(
        **tensors,
        context=laid.context,
        shape=(num_rows, width),
        images=None if images is None else (),
    )
    if layout == "rows":
        assert laid.pack is not None
        prompts = tuple(tokens.mask[:, : length - width].sum(-1).tolist())
        of_rows = tuple(images or [None] * num_rows)
        rows = replace(rows, lengths=tuple(laid.pack.lengths), row_images=of_rows, row_prompts=prompts)
    elif has_images:
        assert images is not None
        rows = _with_features(rows, tokens, laid.kept, images)
    if layout == "packed" and sequence is not None:
        assert laid.pack is not None
        rows = _slice_of(rows, laid.pack, sequence, device)
    return rows.to(device)


@dataclass(frozen=True)
class _Tokens:
    """Those of a batch, (B, L) each.

    content:   input_ids, with the content of images at placeholders.
    positions: (B, L), or (3, B, L) if images give tokens positions in time, height and width.
    mask:      which are not padding.
    """

    input_ids: np.ndarray
    content: np.ndarray
    positions: np.ndarray
    mask: np.ndarray

    @staticmethod
    def of(batch: TensorDict) -> "_Tokens":
        ids = batch["input_ids"].numpy()
        return _Tokens(ids, ids, batch["position_ids"].numpy(), batch["attention_mask"].numpy().astype(bool))

    @property
    def end(self) -> np.ndarray:
        """(B) the place of each row's last token."""
        found: np.ndarray = (np.arange(self.mask.shape[1]) * self.mask).max(-1)
        return found

    @property
    def last(self) -> np.ndarray:
        """(B, 1) that token. Padding repeats it: the embedding of a pad token may be zero, which some norms divide by."""
        return self.input_ids[np.arange(len(self.mask)), self.end, None]


@dataclass(frozen=True)
class _LaidOut:
    """What a layout computes.

    index:   (row, place) of a token in the batch to its index among the computed ones, flattened.
    kept:    (B, L) the batch's tokens that are computed.
    context: see `ForwardRows`.
    pack:    of packed and rows.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    index: Callable[[np.ndarray, np.ndarray], np.ndarray]
    kept: np.ndarray
    context: AttentionContext | None = None
    pack: "_Pack | None" = None


def _laid_out(tokens: _Tokens, prompt_length: int, layout: Layout, device: torch.device) -> _LaidOut:
    if layout == "aligned":
        return _aligned(tokens)
    mask = tokens.mask
    if layout == "padded":
        ids = np.where(mask, tokens.input_ids, tokens.last)
        context = PaddedAttention(torch.from_numpy(mask).to(device))
        return _LaidOut(ids, tokens.positions, lambda row, place: row * mask.shape[1] + place, mask, context)
    pack = _Pack(tokens.content, mask, prompt_length, share_prompts=layout == "packed")
    ids, positions = tokens.input_ids[pack.kept][None], tokens.positions[..., pack.kept][..., None, :]
    packed = PackedAttention(pack.lengths, device, pack.prefixes) if layout == "packed" else None
    return _LaidOut(ids, positions, pack.index, pack.kept, packed, pack)


def _aligned(tokens: _Tokens) -> _LaidOut:
    mask = tokens.mask
    order = (~mask).argsort(1, kind="stable")[:, : mask.sum(-1).max()]
    ids, kept = (np.take_along_axis(values, order, 1) for values in (tokens.input_ids, mask))
    positions = np.broadcast_to(np.arange(order.shape[1]), order.shape).copy()
    count = mask.cumsum(1)  # tokens of the row up to each place

    def index(row: np.ndarray, place: np.ndarray) -> np.ndarray:
        found: np.ndarray = row * order.shape[1] + count[row, place] - 1
        return found

    return _LaidOut(np.where(kept, ids, tokens.last), positions, index, mask)


def _routes(batch: TensorDict, mask: np.ndarray, laid: _LaidOut) -> dict[str, np.ndarray]:
    """(T, layers, K) the experts of the computed tokens, if the batch has them."""
    if "routed_experts" not in batch.keys() or not batch["routed_experts"].numel():  # noqa: SIM118 - a TensorDict
        return {}
    every = np.arange(len(mask))[:, None]
    routes = batch["routed_experts"].numpy()[every, batch["position_ids"].numpy()]  # (B, L, layers, K)
    routes[~mask] = -1
    return {"routes": routes.reshape(-1, *routes.shape[2:]) if laid.pack is None else routes[laid.kept]}


def _places(batch: TensorDict, mask: np.ndarray, laid: _LaidOut) -> dict[str, np.ndarray]:
    """See `ForwardRows.places`."""
    row, place = mask.nonzero()
    places = np.full((len(mask), int(mask.sum(-1).max())), -1)
    places[row, batch["position_ids"].numpy()[row, place]] = laid.index(row, place)
    return {"places": places}


def _with_images(tokens: _Tokens, images: Sequence[ImageInputs | None], rope: RopePositions | None) -> _Tokens:
    """The tokens with the content of images at placeholders, and with the positions that `rope` gives.

    The token of a padding row, which has one token and no images, is 0 if it was a placeholder.
    """
    placeholders = _placeholders_of(images)
    mask, positions = tokens.mask, tokens.positions
    is_padding = np.array([image is None for image in images]) & (mask.sum(-1) == 1)
    input_ids = np.where(is_placeholder(tokens.input_ids, placeholders) & is_padding[:, None], 0, tokens.input_ids)
    content = input_ids.copy()
    for row, image in enumerate(images):
        ids = input_ids[row, mask[row]]
        check_placeholders(int(is_placeholder(ids, placeholders).sum()), image)
        if image is None:
            continue
        content[row, mask[row]] = with_content(ids, image)
        found = None if rope is None else rope(ids.tolist(), image)
        if found is not None:
            if positions.ndim == 2:
                positions = np.repeat(positions[None], 3, 0)
            positions[:, row, mask[row]] = found.numpy()
    return _Tokens(input_ids, content, positions, mask)


def _with_features(
    rows: ForwardRows, tokens: _Tokens, kept: np.ndarray, images: Sequence[ImageInputs | None]
) -> ForwardRows:
    """The rows with their images, equal ones once, and the feature of each placeholder that is kept."""
    first: dict[tuple[bytes, ...], int] = {}  # where the features of the same images start
    distinct: list[ImageInputs] = []
    found: list[np.ndarray] = []
    num_features = 0
    for row, image in enumerate(images):
        if image is None:
            continue
        if image.digests not in first:
            first[image.digests] = num_features
            distinct.append(image)
            num_features += sum(image.num_tokens)
        is_image = is_placeholder(tokens.input_ids[row], image.placeholders)
        number = (is_image & tokens.mask[row]).cumsum() - 1  # of the placeholder in its row
        found.append(first[image.digests] + number[is_image & kept[row]])
    features = torch.from_numpy(np.concatenate(found))
    return replace(rows, images=tuple(distinct), features=features, placeholders=_placeholders_of(images))


def _placeholders_of(images: Sequence[ImageInputs | None]) -> tuple[int, ...]:
    """The placeholder tokens of all rows."""
    return tuple(sorted({token for image in images if image is not None for token in image.placeholders}))


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
    routes = places = features = None
    if rows.features is not None:
        is_image = tokens_among(rows.input_ids, rows.placeholders)
        before, here = (int(is_image[:, a:b].sum()) for a, b in ((0, start), (start, start + share)))
        features = rows.features[before : before + here]
    if rows.routes is not None:
        routes = F.pad(rows.routes, (0, 0, 0, 0, 0, missing), value=-1)[start : start + share]
    if rows.places is not None:
        is_here = (rows.places >= start) & (rows.places < start + share)
        places = torch.where(is_here, rows.places - start, -1)
    return ForwardRows(
        input_ids=F.pad(rows.input_ids, (0, missing))[:, start : start + share],
        position_ids=F.pad(rows.position_ids, (0, missing))[..., start : start + share],
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
        images=rows.images,
        features=features,
        placeholders=rows.placeholders,
    )
