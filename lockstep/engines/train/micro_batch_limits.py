"""Out of memory in a forward or backward pass: which micro-batch it was, and the smaller size that the run goes on with.

    micro-batch does not fit ─► MicroBatchFailure ─► half the size ─► the whole mini-batch again

A size belongs to the config key that sets it, so that the passes of one key share it, as they share the key.
"""

import gc
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from lockstep.engines.train.train_engine import MicroBatching

ATTRIBUTE = "micro_batch"
"""Of an error out of memory: its MicroBatchFailure."""


@dataclass(frozen=True)
class MicroBatchFailure:
    """The micro-batch that did not fit.

    key:        the config key of its size.
    smaller:    the size to go on with; None if it is a single sequence, or the sequences that must stay together.
    prompt, response: tokens of its sequences.
    num_sequences: that it has.
    """

    key: str
    smaller: int | None
    prompt: int
    response: int
    num_sequences: int


def failure_of(error: BaseException) -> MicroBatchFailure | None:
    """The micro-batch in which a pass ran out of memory; None for other errors. The attribute survives pickling."""
    found: MicroBatchFailure | None = getattr(error, ATTRIBUTE, None)
    return found


class MicroBatchLimits:
    """The sizes that out of memory has lowered, by config key: tokens, or sequences (pairs) if the key counts those."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._new: list[tuple[str, int]] = []

    def set(self, sizes: Mapping[str, int]) -> None:
        """Those of an earlier part of the run."""
        self.sizes |= sizes

    def lower(self, key: str, size: int) -> None:
        """key: `MicroBatching.limit_name`."""
        self.sizes[key] = size
        if "." in key:  # otherwise an audit's, which the user cannot set
            self._new.append((key, size))

    def take(self) -> list[tuple[str, int]]:
        """Keys and sizes that were lowered since the last call, in order."""
        taken, self._new = self._new, []
        return taken

    def within(self, micro: MicroBatching) -> MicroBatching:
        """The config's sizes, or the lowered ones if they are smaller."""
        limit = self.sizes.get(micro.limit_name)
        if limit is None:
            return micro
        if micro.max_tokens is not None:
            return replace(micro, max_tokens=min(micro.max_tokens, limit))
        num_rows = limit * micro.group_size
        return replace(micro, num_rows=num_rows if micro.num_rows is None else min(micro.num_rows, num_rows))


def halved(size: int, used: int) -> int:
    """The largest half, quarter, … of `size` that is below what the micro-batch had used, which is at least 2."""
    while size >= used:
        size //= 2
    return size


class RandomState:
    """The random generators of this process at the time of creation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def free_unused(parameters: Iterable[torch.nn.Parameter] = ()) -> None:
    """Free what a failed pass has left: gradients of these parameters, reference cycles, the allocator's cache."""
    for parameter in parameters:
        parameter.grad = None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
