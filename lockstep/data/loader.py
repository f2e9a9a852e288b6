"""Batches in an order that can be resumed: epoch e's order depends only on (seed, e), the state is a position in it."""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.data.rl_dataset import collate_fn

EpochOrder = Callable[[int], Sequence[int]]
"""Epoch number to the order of the dataset's rows in it; must give the same answer whenever it is asked."""


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
        order: EpochOrder,
        fingerprint: dict[str, Any],
        num_workers: int = 0,
        drop_last: bool = True,
        collate: Callable[[Sequence[Any]], Any] = collate_fn,
    ) -> None:
        assert isinstance(dataset, Sized)
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_rows = len(dataset)
        self.num_workers = num_workers
        self.drop_last = drop_last
        self._collate = collate
        self._order = order
        self._fingerprint = fingerprint
        self.epoch = 0
        self.position = 0
        """Rows of the current epoch that were handed out."""

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self._starts(0))

    def __iter__(self) -> Iterator[Any]:
        order = list(self._order(self.epoch))
        starts = self._starts(self.position)
        loader = DataLoader(
            self.dataset,
            batch_sampler=[order[start : start + self.batch_size] for start in starts],
            num_workers=self.num_workers,
            collate_fn=self._collate,
            # Its own generator: the seed that DataLoader draws for its workers must not move the run's RNG.
            generator=torch.Generator().manual_seed(self.epoch),
        )
        for start, batch in zip(starts, loader):
            if start == starts[-1]:
                self.epoch, self.position = self.epoch + 1, 0
            else:
                self.position = start + self.batch_size
            yield batch

    def _starts(self, position: int) -> list[int]:
        end = self.num_rows - self.batch_size + 1 if self.drop_last else self.num_rows
        return list(range(position, end, self.batch_size))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "order": dict(self._fingerprint)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; refused where the order of the rows is no longer the same."""
        for name, saved in state["order"].items():
            if self._fingerprint[name] != saved:
                raise ValueError(
                    f"cannot resume the data order: {name} was {saved!r} and is now {self._fingerprint[name]!r}; "
                    "resume with the same data files and settings, or start anew with trainer.resume_mode=disable"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        if not self._starts(self.position):  # a larger batch than before no longer fits into the rest of the epoch
            self.epoch, self.position = self.epoch + 1, 0


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
    sampler: EpochOrder | None = None,
) -> StatefulLoader:
    """A resumable loader; `sampler` gives the order of an epoch's rows in place of `shuffle` and `seed`."""
    assert isinstance(dataset, Sized)
    num_rows = len(dataset)
    if num_rows == 0:
        raise ValueError("the dataset is empty; check data.train_files and data.val_files")
    if batch_size < 1:
        raise ValueError(f"data.train_batch_size (data.val_batch_size) must be at least 1, not {batch_size}")
    if drop_last and num_rows < batch_size:
        raise ValueError(
            f"data.train_batch_size={batch_size}, but the dataset has only {num_rows} rows: not one full batch. "
            f"Set data.train_batch_size to at most {num_rows}"
        )
    if seed < 0:
        raise ValueError(f"data.seed={seed} must not be negative")
    if num_workers < 0:
        raise ValueError(f"data.dataloader_num_workers={num_workers} must not be negative")

    def order(epoch: int) -> Sequence[int]:
        if sampler is not None:
            return sampler(epoch)
        return shuffled_order(num_rows, seed, epoch) if shuffle else range(num_rows)

    fingerprint = {"number of rows": num_rows, "data.shuffle": shuffle, "data.seed": seed}
    return StatefulLoader(dataset, batch_size, order, fingerprint, num_workers, drop_last)
