"""Batches in an order that can be resumed: epoch e's order depends only on (seed, e), the state is a position in it.

A sampler of the user's in place of that order is resumed by its own state, or by drawing again (see `sampler.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.rl_dataset import collate_fn as collate_samples
from lockstep.data.sampler import AbstractCurriculumSampler, Resumable
from lockstep.protocol import DataProto

EpochOrder = Callable[[int], Sequence[int]]
"""Epoch number to the order of the dataset's rows in it; must give the same answer whenever it is asked."""

Collate = Callable[[Sequence[Any]], Any]


class StatefulLoader:
    """A cursor over the endless sequence of epochs: iterating gives the rest of the current epoch.

    A batch counts as done when it is handed out; with the last one the cursor stands at the next epoch's begin, so a
    state saved while that batch is worked on resumes there. Leaving a loop early and iterating again goes on where it
    stopped.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        order: "EpochOrder | Sampler[int]",
        fingerprint: dict[str, Any],
        num_workers: int = 0,
        drop_last: bool = True,
        collate: Collate = collate_samples,
    ) -> None:
        assert isinstance(dataset, Sized)
        self.dataset = dataset
        self.batch_size = batch_size
        self.rows = _SampledRows(order) if isinstance(order, Sampler) else _OrderedRows(order)
        self.num_rows = self.rows.per_epoch(len(dataset))
        self.num_workers = num_workers
        self.drop_last = drop_last
        self._collate = collate
        self._fingerprint = fingerprint
        self.epoch = 0
        self.position = 0
        """Rows of the current epoch that were handed out."""

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self._starts(0))

    def __iter__(self) -> Iterator[Any]:
        starts = self._starts(self.position)
        loader = DataLoader(
            self.dataset,
            batch_sampler=self._batches(starts),
            num_workers=self.num_workers,
            collate_fn=self._collate,
            # Its own generator: the seed that DataLoader draws for its workers must not move the run's RNG.
            generator=torch.Generator().manual_seed(self.epoch),
        )
        for start, batch in zip(starts, loader):
            if start == starts[-1]:
                self.rows.end_epoch(self.num_rows - start - self.batch_size)
                self.epoch, self.position = self.epoch + 1, 0
            else:
                self.position = start + self.batch_size
            yield batch

    def _batches(self, starts: list[int]) -> Iterator[list[int]]:
        """The row numbers of each batch, drawn when the batch is asked for and not before."""
        rest = self.rows.rest_of_epoch(self.epoch, self.position)
        for start in starts:
            size = min(self.batch_size, self.num_rows - start)
            batch = [int(row) for row in islice(rest, size)]
            if len(batch) < size:
                raise ValueError(
                    f"the sampler gave {start + len(batch)} rows in epoch {self.epoch}, but its len() is {self.num_rows}"
                )
            yield batch

    def _starts(self, position: int) -> list[int]:
        end = self.num_rows - self.batch_size + 1 if self.drop_last else self.num_rows
        return list(range(position, end, self.batch_size))

    def on_batch_end(self, batch: DataProto) -> None:
        """Tell a curriculum sampler (`update`) and the dataset (`on_batch_end`) of a finished training step."""
        sampler = self.rows.sampler
        if isinstance(sampler, AbstractCurriculumSampler):
            sampler.update(batch)
        if hasattr(self.dataset, "on_batch_end"):
            self.dataset.on_batch_end(batch)

    def state_dict(self) -> dict[str, Any]:
        state = {"epoch": self.epoch, "position": self.position, "order": dict(self._fingerprint)}
        for name, part in self._resumable_parts().items():
            state[name] = part.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; refused where the order of the rows is no longer the same."""
        for name, saved in state["order"].items():
            if self._fingerprint[name] != saved:
                raise ValueError(
                    f"cannot resume the data order: {name} was {saved!r} and is now {self._fingerprint[name]!r}; "
                    "resume with the same data files and settings, or start anew with trainer.resume_mode=disable"
                )
        for name, part in self._resumable_parts().items():
            if name not in state:
                raise ValueError(
                    f"cannot resume the data order: the checkpoint holds no state of the {name}; resume with the "
                    "classes it was made with, or start anew with trainer.resume_mode=disable"
                )
            part.load_state_dict(state[name])
        self.epoch, self.position = state["epoch"], state["position"]
        self.rows.resume(self.epoch, self.num_rows)
        if not self._starts(self.position):  # a larger batch than before no longer fits into the rest of the epoch
            self.rows.end_epoch(self.num_rows - self.position)
            self.epoch, self.position = self.epoch + 1, 0

    def _resumable_parts(self) -> dict[str, Resumable]:
        parts: dict[str, Any] = {"sampler": self.rows.sampler, "dataset": self.dataset}
        return {name: part for name, part in parts.items() if isinstance(part, Resumable)}


class _OrderedRows:
    """Rows in an order that is known for every epoch."""

    sampler = None

    def __init__(self, order: EpochOrder) -> None:
        self._order = order

    def per_epoch(self, num_rows: int) -> int:
        return num_rows

    def rest_of_epoch(self, epoch: int, position: int) -> Iterator[int]:
        return iter(self._order(epoch)[position:])

    def end_epoch(self, num_left: int) -> None:
        """Nothing to do: the next epoch's order does not depend on this one's."""

    def resume(self, epoch: int, num_rows: int) -> None:
        """Nothing to do: the order is asked for by epoch."""


class _SampledRows:
    """Rows as a sampler gives them: one iterator an epoch, kept while the epoch lasts."""

    def __init__(self, sampler: "Sampler[int]") -> None:
        self.sampler = sampler
        self._drawing: Iterator[int] | None = None

    def per_epoch(self, num_rows: int) -> int:
        return len(self.sampler) if isinstance(self.sampler, Sized) else num_rows

    def rest_of_epoch(self, epoch: int, position: int) -> Iterator[int]:
        if self._drawing is None:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            self._drawing = iter(self.sampler)
            if not isinstance(self.sampler, Resumable):
                _exhaust(islice(self._drawing, position))
        return self._drawing

    def end_epoch(self, num_left: int) -> None:
        """Draw what no batch takes, and once more, so that a sampler written as a generator runs to its end."""
        if self._drawing is not None:
            _exhaust(islice(self._drawing, max(num_left, 0) + 1))
        self._drawing = None

    def resume(self, epoch: int, num_rows: int) -> None:
        """A sampler that keeps no state and is not told the epoch draws the epochs before anew."""
        self._drawing = None
        if not isinstance(self.sampler, Resumable) and not hasattr(self.sampler, "set_epoch"):
            for _ in range(epoch):
                _exhaust(islice(iter(self.sampler), num_rows + 1))


def _exhaust(rows: Iterable[int]) -> None:
    for _ in rows:
        pass


def shuffled_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation that depends on nothing but the arguments (numpy keeps RandomState's stream the same for good)."""
    words = np.random.SeedSequence([seed, epoch]).generate_state(4)
    return np.random.RandomState(words).permutation(num_rows).tolist()


def create_dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    shuffle: bool,
    seed: int,
    num_workers: int = 0,
    drop_last: bool = True,
    sampler: "EpochOrder | Sampler[int] | None" = None,
    collate_fn: Collate | None = None,
) -> StatefulLoader:
    """A resumable loader.

    sampler:    gives the order of an epoch's rows in place of `shuffle` and `seed`.
    collate_fn: samples to a batch; null takes the dataset's own `collate_fn` if it has one, else the built-in one.
    """
    assert isinstance(dataset, Sized)
    num_rows = len(dataset)
    if num_rows == 0:
        raise ValueError("the dataset is empty; check data.train_files and data.val_files")
    if batch_size < 1:
        raise ValueError(f"data.train_batch_size (data.val_batch_size) must be at least 1, not {batch_size}")
    if seed < 0:
        raise ValueError(f"data.seed={seed} must not be negative")
    if num_workers < 0:
        raise ValueError(f"data.dataloader_num_workers={num_workers} must not be negative")
    if isinstance(sampler, Sampler) and num_workers != 0:
        raise ValueError(
            f"data.dataloader_num_workers={num_workers} with a sampler: loader processes would draw rows ahead of the "
            "steps; set data.dataloader_num_workers=0"
        )

    def seeded_order(epoch: int) -> Sequence[int]:
        return shuffled_order(num_rows, seed, epoch) if shuffle else range(num_rows)

    loader = StatefulLoader(
        dataset,
        batch_size,
        order=seeded_order if sampler is None else sampler,
        fingerprint={"number of rows": num_rows, "data.shuffle": shuffle, "data.seed": seed},
        num_workers=num_workers,
        drop_last=drop_last,
        collate=collate_fn or getattr(dataset, "collate_fn", None) or collate_samples,
    )
    if drop_last and loader.num_rows < batch_size:
        whose = "the dataset has" if loader.num_rows == num_rows else f"{type(sampler).__name__} gives"
        raise ValueError(
            f"data.train_batch_size={batch_size}, but {whose} only {loader.num_rows} rows: not one full batch. "
            f"Set data.train_batch_size to at most {loader.num_rows}"
        )
    return loader
