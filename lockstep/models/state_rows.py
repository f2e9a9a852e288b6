"""Layers with a state (recurrence, convolution): the state of rows, and packed tokens as rows that follow one another.

    packed:  p1 p2 p3 r1 r2 | s1 s2 | q1 q2 t1       two sequences share the prompt p; q t is another one
    groups:  p1 p2 p3 ─► state ─► r1 r2              rows of one group are computed together, padded on the right
                              └─► s1 s2
             q1 q2 t1

What computes such a layer (`StateCore`) knows nothing of packing: it gets rows and the state with which they begin, and leaves the
state with which they end. Nothing is written in place, so that gradients flow from a response into the prompt before it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.utils.device import to_device

StateName = tuple[Literal["conv", "recurrent"], int]


class RowStates:
    """The state of N rows in one layer, with the methods of a transformers cache that its mixers call.

    tensors: (N, …) by kind and number; none for rows without tokens before them.
    """

    record_past = False

    def __init__(self, tensors: Mapping[StateName, Tensor] | None = None) -> None:
        self.tensors: dict[StateName, Tensor] = dict(tensors or {})

    @property
    def layers(self) -> "_EveryLayer":
        return _EveryLayer(self)

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return self._of("conv")

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return self._of("recurrent")

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.tensors)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Append (N, C, L) to the convolution's inputs, of which the last are kept; returns all of them."""
        before = self.tensors.get(("conv", state_idx))
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            whole = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = before.shape[-1]
            whole = torch.cat([before, conv_states], -1)
        self.tensors["conv", state_idx] = whole[..., whole.shape[-1] - width :]
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int | None = None, state_idx: int = 0, **options: Any
    ) -> Tensor:
        self.tensors["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.tensors.get(("recurrent", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache)

    def select(self, rows: Tensor) -> "RowStates":
        return RowStates({name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()})

    def and_empty(self) -> "RowStates":
        """One more row, without tokens before it."""
        zeros = {name: tensor.new_zeros(1, *tensor.shape[1:]) for name, tensor in self.tensors.items()}
        return RowStates.cat([self, RowStates(zeros)])

    @staticmethod
    def cat(parts: "Sequence[RowStates]") -> "RowStates":
        return RowStates({name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors})

    def _of(self, kind: str) -> dict[int, Tensor]:
        return {number: tensor for (of_kind, number), tensor in self.tensors.items() if of_kind == kind}


class _EveryLayer:
    """`cache.layers[i]` of transformers: there is one layer here."""

    def __init__(self, states: RowStates) -> None:
        self._states = states

    def __getitem__(self, layer_idx: int) -> RowStates:
        return self._states


StateCore = Callable[[Tensor, RowStates], Tensor]
"""rows (N, L, C), states -> (N, L, C'). The states become those after the last of the L tokens, padding included."""


@runtime_checkable
class PackedCore(Protocol):
    """A core that also has a form without padding."""

    def __call__(self, rows: Tensor, states: RowStates) -> Tensor: ...

    def packed(self, x: Tensor, bounds: "RowBounds", states: RowStates) -> Tensor:
        """x (1, T, C): tokens of N rows one after another, states of N rows -> (1, T, C')."""


@runtime_checkable
class InPlaceCore(Protocol):
    """A core that also has a form for one token per row on states that stay where they are."""

    def __call__(self, rows: Tensor, states: RowStates) -> Tensor: ...

    def step_in_place(self, rows: Tensor, tensors: Mapping[StateName, Tensor], slots: Tensor) -> Tensor:
        """rows (N, 1, C) after others, tensors (slots, …), slots (N,) of the rows' states -> (N, 1, C'), without a gradient."""


class RowBounds:
    """N rows that lie one after another. bounds: (N + 1,) int64, where they begin and end."""

    def __init__(self, bounds: np.ndarray, device: torch.device) -> None:
        self.tensor = to_device(torch.from_numpy(bounds), device)
        self._bounds = bounds
        self._device = device
        self._spaced: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._last_tokens: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def num_tokens(self) -> int:
        return int(self._bounds[-1])

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """(T,) int32: tokens of its row before each, and its row."""
        lengths = np.diff(self._bounds)
        row = np.arange(len(self)).repeat(lengths)
        age = np.arange(self.num_tokens) - self._bounds[row]
        of_age, of_row = (torch.from_numpy(array.astype(np.int32)) for array in (age, row))
        return to_device(of_age, self._device), to_device(of_row, self._device)

    def last_inputs(self, x: Tensor, before: Tensor | None, width: int) -> Tensor:
        """The last `width` inputs of each row, x (T, C) -> (N, C, width). before: (N, C, width) those before the rows, or zeros."""
        token, is_own, column = self._last(width)
        last = x.index_select(0, token).unflatten(0, (len(self), width)).transpose(1, 2)
        if is_own is None or column is None:
            return last
        if before is None:
            return last * is_own
        return torch.where(is_own, last, before.to(x.dtype).gather(2, column.expand_as(before)))

    def _last(self, width: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(N * width,) the last tokens of each row. If a row is shorter: (N, 1, width) which are its own, and where the others are
        among the inputs before it."""
        if width not in self._last_tokens:
            lengths = np.diff(self._bounds)
            token = self._bounds[1:, None] - width + np.arange(width)
            is_own = token >= self._bounds[:-1, None]
            column = (np.arange(width) + lengths[:, None]).clip(max=width - 1)
            rest = (None, None) if is_own.all() else (self._put(is_own)[:, None], self._put(column)[:, None])
            self._last_tokens[width] = self._put(token.clip(0).ravel()), *rest
        return self._last_tokens[width]

    def _put(self, array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(array), self._device)

    def spaced(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """With `width` places before each row: (T,) the place of each token, (N * width,) these places, and the last of each row.

        A row's last places begin before it if it is shorter.
        """
        if width not in self._spaced:
            shift = np.arange(1, len(self) + 1) * width
            before = np.arange(width) - width
            tokens = np.arange(self.num_tokens) + shift.repeat(np.diff(self._bounds))
            starts, ends = ((part + shift)[:, None] + before for part in (self._bounds[:-1], self._bounds[1:]))
            arrays = (torch.from_numpy(array.ravel()) for array in (tokens, starts, ends))
            of_tokens, at_starts, at_ends = (to_device(array, self._device) for array in arrays)
            self._spaced[width] = of_tokens, at_starts, at_ends
        return self._spaced[width]


@dataclass(frozen=True)
class _Group:
    """Rows that are computed together.

    index:  (N, L) tokens; padding repeats a row's last.
    own:    (N, L) whose output is that token's: False at padding and at a prompt that another row owns.
    source: (N,) rows among those whose state is kept, with which these begin; None if they begin without tokens before them.
    keeps:  whether the state is kept, for which rows are not padded.
    """

    index: np.ndarray
    own: np.ndarray
    source: np.ndarray | None = None
    keeps: bool = False


@dataclass(frozen=True)
class _Part:
    """Rows that a `PackedCore` computes together.

    tokens: (T',) of the rows, one after another.
    source: (N,) rows among those whose state is kept, the number of these for a row that begins without a state; None for the
            rows that are kept.
    """

    tokens: Tensor
    bounds: RowBounds
    source: Tensor | None


class PackedRows:
    """lengths, prefixes: as in `PackedAttention`.

    continues: whether a row that shares a prompt begins with the state at its end. Otherwise it begins with the prompt's tokens.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        prefixes: Sequence[tuple[int, int]] | None = None,
        *,
        continues: bool = True,
    ) -> None:
        self._lengths = lengths
        self._prefixes = prefixes or [(0, 0)] * len(lengths)
        self._device = device
        self._continues = continues

    def run(self, core: StateCore, x: Tensor) -> Tensor:
        """(1, T, C) packed tokens -> (1, T, C')."""
        if isinstance(core, PackedCore):
            return self._run_packed(core, x)
        kept: list[RowStates] = []
        outputs = []
        for group, index, source in self._on_device:
            states = RowStates() if source is None else RowStates.cat(kept).select(source)
            rows = x[0].index_select(0, index).unflatten(0, group.index.shape)
            outputs.append(core(rows, states).flatten(0, 1))
            if group.keeps:
                kept.append(states)
        return torch.cat(outputs).index_select(0, self._token_index)[None]

    def _run_packed(self, core: PackedCore, x: Tensor) -> Tensor:
        """The shared prompts in one call, then everything else in another."""
        parts, token_index = self._parts
        kept = RowStates()
        if token_index is None:
            return core.packed(x, parts[0].bounds, kept)
        outputs = []
        for part in parts:
            states = kept if part.source is None else kept.and_empty().select(part.source)
            outputs.append(core.packed(x.index_select(1, part.tokens), part.bounds, states))
        return torch.cat(outputs, 1).index_select(1, token_index)

    @cached_property
    def _parts(self) -> "tuple[list[_Part], Tensor | None]":
        """The shared prompts, and everything else; (T,) where each token is among theirs, None if all are in order."""
        parts, tokens = [], []
        num_kept = sum(len(group.index) for group in self.groups if group.keeps)
        for keeps in (True, False):
            groups = [group for group in self.groups if group.keeps is keeps]
            if not groups:
                continue
            first = np.concatenate([group.index[:, 0] for group in groups])
            count = np.concatenate([group.own.sum(1) for group in groups])
            source = [np.full(len(g.index), num_kept) if g.source is None else g.source for g in groups]
            # prompts stay in the order of their states
            order = np.arange(len(first)) if keeps else first.argsort()
            tokens.append(np.concatenate([np.arange(first[row], first[row] + count[row]) for row in order]))
            bounds = RowBounds(np.concatenate([[0], count[order].cumsum()]), self._device)
            begins = None if keeps else self._put(np.concatenate(source)[order])
            parts.append(_Part(self._put(tokens[-1]), bounds, begins))
        place = np.concatenate(tokens).argsort()
        is_ordered = len(parts) == 1 and bool((place == np.arange(len(place))).all())
        return parts, None if is_ordered else self._put(place)

    @cached_property
    def groups(self) -> list[_Group]:
        starts = [0, *accumulate(self._lengths)][:-1]
        return self._after_prompts(starts) if self._continues else self._with_prompts(starts)

    def _after_prompts(self, starts: Sequence[int]) -> list[_Group]:
        """First the prompts that are shared, by length; then everything else."""
        shared = sorted({prefix for prefix in self._prefixes if prefix[1]}, key=lambda prefix: prefix[1])
        place = {prefix: number for number, prefix in enumerate(shared)}
        owned = dict(shared)  # first token of an owner -> tokens of the prompt that others share
        groups = []
        for length in sorted({count for _, count in shared}):
            first = np.array([start for start, count in shared if count == length])
            index = first[:, None] + np.arange(length)
            groups.append(_Group(index, np.ones_like(index, dtype=bool), keeps=True))
        alone: list[tuple[int, int, int]] = []
        after: list[tuple[int, int, int]] = []
        for start, length, prefix in zip(starts, self._lengths, self._prefixes):
            if not length:  # it begins where the next row does
                continue
            if start in owned:
                prefix = (start, owned[start])
                start, length = start + owned[start], length - owned[start]
            if length:
                (after if prefix[1] else alone).append((start, length, place.get(prefix, -1)))
        for rows, follows in ((alone, False), (after, True)):
            if not rows:
                continue
            first, count, source = np.array(rows).T
            for which in length_buckets(count):
                # one token after a state is a decode step to transformers' mixers, which write it in place: no gradient
                token = np.arange(max(2 if follows else 1, count[which].max()))
                index = first[which, None] + np.minimum(token, count[which, None] - 1)
                groups.append(_Group(index, token < count[which, None], source[which] if follows else None))
        return groups

    def _with_prompts(self, starts: Sequence[int]) -> list[_Group]:
        groups = []
        first, count, prefix, before = np.array(
            [(start, n, *prefix) for start, n, prefix in zip(starts, self._lengths, self._prefixes) if n]
        ).T[..., None]
        for which in length_buckets((count + before)[:, 0]):
            token = np.arange((count + before)[which].max())
            own = first[which] + np.minimum(token - before[which], count[which] - 1)
            index = np.where(token < before[which], prefix[which] + token, own)
            groups.append(_Group(index, (token >= before[which]) & (token < (before + count)[which])))
        return groups

    @cached_property
    def _on_device(self) -> list[tuple[_Group, Tensor, Tensor | None]]:
        return [
            (group, self._put(group.index.ravel()), None if group.source is None else self._put(group.source))
            for group in self.groups
        ]

    @cached_property
    def _token_index(self) -> Tensor:
        """(T,) where the output of each token is among those of all groups."""
        index = np.concatenate([group.index.ravel() for group in self.groups])
        places = np.flatnonzero(np.concatenate([group.own.ravel() for group in self.groups]))
        found = np.empty(sum(self._lengths), dtype=np.int64)
        found[index[places]] = places
        return self._put(found)

    def _put(self, array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(array), self._device)


def length_buckets(num_keys: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of the sequences, sorted by length and cut so that the longest of a bucket is at most twice the shortest."""
    order = num_keys.argsort(kind="stable")
    start = 0
    for place, length in enumerate(num_keys[order].tolist()):
        if place == start:
            longest = 2 * max(length, 8)
        elif length > longest:
            yield order[start:place]
            start = place
            longest = 2 * max(length, 8)
    if len(order):
        yield order[start:]
