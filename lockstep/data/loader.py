"""Resumable data loader: the order of epoch e depends only on (seed, e), and the state is a position in it.

A custom sampler is resumed from its own state, or by drawing again (see `sampler.py`).
"""

import atexit
import multiprocessing
import multiprocessing.process
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.config.ppo import PPOConfig, prompts_per_batch
from lockstep.data.fingerprint import changes, content_of
from lockstep.data.rl_dataset import collate_fn as collate_samples
from lockstep.data.row_ledger import RowLedger, Rule
from lockstep.data.sampler import AbstractCurriculumSampler, Resumable
from lockstep.protocol import DataProto
from lockstep.utils import heartbeat
from lockstep.utils.progress import waiting
from lockstep.utils.state_file import encode

EpochOrder = Callable[[int], Sequence[int]]
"""Epoch number -> order of the dataset's rows in it; must be deterministic."""

Collate = Callable[[Sequence[Any]], Any]


class StatefulLoader:
    """A cursor over an endless sequence of epochs; iterating yields the rest of the current epoch.

    A batch counts as done when it is yielded; with the last one the cursor moves to the start of the next epoch, so a
    state saved during that step resumes there. Iterating again after leaving a loop early continues where it stopped.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        order: "EpochOrder | Sampler[int]",
        settings: dict[str, Any],
        num_workers: int = 0,
        drop_last: bool = True,
        collate: Collate = collate_samples,
    ) -> None:
        assert isinstance(dataset, Sized)
        self.dataset = dataset
        self.batch_size = batch_size
        self.rows = _SampledRows(order, len(dataset)) if isinstance(order, Sampler) else _OrderedRows(order)
        self.num_rows = self.rows.per_epoch(len(dataset))
        self.ledger = RowLedger(len(dataset), self.rows.rule)
        self.drawn: list[int] = []
        """Row numbers of the batch that was yielded last."""
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.collate = collate
        self._settings = settings
        self.epoch = 0
        self.position = 0
        """Rows of the current epoch that have been yielded."""

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self._starts(0))

    def __iter__(self) -> Iterator[Any]:
        starts = self._starts(self.position)
        ahead: deque[list[int]] = deque()  # rows of batches that are not yielded yet
        loader = DataLoader(
            self.dataset,
            batch_sampler=self._batches(starts, ahead),
            num_workers=self.num_workers,
            collate_fn=self.collate,
            worker_init_fn=_begin_process,
            # Own generator: the seed that DataLoader draws for its workers must not advance the run's RNG.
            generator=torch.Generator().manual_seed(self.epoch),
        )
        others = set(multiprocessing.active_children())
        if self.num_workers:
            heartbeat.write_stacks_on_signal()
        try:
            batches = iter(loader)
        finally:  # it may fail after starting processes, if a limit allows no more threads
            _PROCESSES.update(set(multiprocessing.active_children()) - others)
        for start in starts:
            with self._waiting(batches):
                batch = next(batches)
            self.drawn = ahead.popleft()
            self.ledger.draw(self.drawn, self.epoch)
            if start == starts[-1]:
                self.ledger.end_epoch(self.epoch, self.batch_size - 1 if self.drop_last else 0)
                self.rows.end_epoch(self.num_rows - start - self.batch_size)
                self.epoch, self.position = self.epoch + 1, 0
            else:
                self.position = start + self.batch_size
            yield batch

    def _waiting(self, batches: Any) -> AbstractContextManager[Any]:
        """For the dataset or, if there are any, the process that makes the next batch."""
        name = type(self.dataset).__name__
        workers = getattr(batches, "_workers", None)
        task = getattr(batches, "_task_info", {}).get(getattr(batches, "_rcvd_idx", None))
        if not workers or not task:
            return waiting("data loader", name)
        number, pid = task[0], workers[task[0]].pid
        name = f"{name}, process {number} of {len(workers)} (pid {pid})"
        return waiting("data loader", name, stacks=partial(heartbeat.child_stacks, pid))

    def _batches(self, starts: list[int], ahead: deque[list[int]]) -> Iterator[list[int]]:
        """The row numbers of each batch, drawn only when the batch is requested. ahead: gets them too."""
        rest = self.rows.rest_of_epoch(self.epoch, self.position)
        for start in starts:
            size = min(self.batch_size, self.num_rows - start)
            batch = [int(row) for row in islice(rest, size)]
            if len(batch) < size:
                raise ValueError(
                    f"the sampler yielded {start + len(batch)} rows in epoch {self.epoch}, but its len() is {self.num_rows}"
                )
            ahead.append(batch)
            yield batch

    def _starts(self, position: int) -> list[int]:
        end = self.num_rows - self.batch_size + 1 if self.drop_last else self.num_rows
        return list(range(position, end, self.batch_size))

    @cached_property
    def _content(self) -> dict[str, str]:
        return content_of(self.dataset)

    def on_batch_end(self, batch: DataProto) -> None:
        """Pass the batch of a finished training step to a curriculum sampler (`update`) and the dataset (`on_batch_end`)."""
        sampler = self.rows.sampler
        if isinstance(sampler, AbstractCurriculumSampler):
            sampler.update(batch)
        if hasattr(self.dataset, "on_batch_end"):
            self.dataset.on_batch_end(batch)

    def state_dict(self) -> dict[str, Any]:
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "order": dict(self._settings),
            "content": self._content,
            "drawn": self.ledger.state_dict(),
        }
        for name, part in self._resumable_parts().items():
            state[name] = part.state_dict()
        return state

    def check_state(self) -> None:
        """ValueError if the state of a custom sampler or dataset cannot be saved; better now than at the first checkpoint."""
        for name, part in self._resumable_parts().items():
            encode(part.state_dict(), owner=f"{type(part).__name__}.state_dict() of the {name}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; an error if the rows or their order have changed."""
        settings = self._settings.items()
        problems = [f"{k} was {state['order'][k]!r} and is now {v!r}" for k, v in settings if state["order"][k] != v]
        if "content" in state and state["content"] and self._content:
            problems += changes(state["content"], self._content)
        if problems:
            raise ValueError(
                f"cannot resume the data order: {'; '.join(problems)}. Resume with the same data files and settings; or start "
                "over with trainer.resume_mode=disable; or start a new run from the trained weights, with "
                "the model's path set to the checkpoint's huggingface folder and another trainer.default_local_dir"
            )
        for name, part in self._resumable_parts().items():
            if name not in state:
                raise ValueError(
                    f"cannot resume the data order: the checkpoint has no state of the {name}; resume with the same "
                    "classes, or start over with trainer.resume_mode=disable"
                )
            part.load_state_dict(state[name])
        self.epoch, self.position = state["epoch"], state["position"]
        self.rows.resume(self.epoch, self.num_rows)
        self.ledger.resume(self.rows.before(self.epoch, self.position), self.epoch, state.get("drawn"))
        if not self._starts(self.position):  # the batch size was raised and no batch is left in this epoch
            self.rows.end_epoch(self.num_rows - self.position)
            self.ledger.end_epoch(self.epoch, self.batch_size - 1)
            self.epoch, self.position = self.epoch + 1, 0

    def _resumable_parts(self) -> dict[str, Resumable]:
        parts: dict[str, Any] = {"sampler": self.rows.sampler, "dataset": self.dataset}
        return {name: part for name, part in parts.items() if isinstance(part, Resumable)}


_PROCESSES: "weakref.WeakSet[multiprocessing.process.BaseProcess]" = weakref.WeakSet()
"""Loader processes of this program."""


@atexit.register
def _kill_processes() -> None:
    """At exit, before multiprocessing waits for its children: they ignore the SIGTERM that it sends them."""
    if _PROCESSES:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a loader process is killed
    for process in _PROCESSES:
        process.kill()


def _begin_process(worker: int) -> None:
    """In a loader process: signals to the whole job stop it after its step, until which it needs this process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    heartbeat.write_stacks_on_signal()  # no-op if the handler was inherited


class _OrderedRows:
    """Rows in an order that is known for every epoch."""

    sampler = None
    rule: Rule = "each_once"

    def __init__(self, order: EpochOrder) -> None:
        self._order = order

    def per_epoch(self, num_rows: int) -> int:
        return num_rows

    def rest_of_epoch(self, epoch: int, position: int) -> Iterator[int]:
        return iter(self._order(epoch)[position:])

    def before(self, epoch: int, position: int) -> Sequence[int]:
        """The rows before a position, if they are known."""
        return self._order(epoch)[:position]

    def end_epoch(self, num_left: int) -> None:
        """No-op: the next epoch's order does not depend on this one's."""

    def resume(self, epoch: int, num_rows: int) -> None:
        """No-op: the order is a function of the epoch."""


class _SampledRows:
    """Rows in a sampler's order: one iterator per epoch, kept until the epoch ends."""

    def __init__(self, sampler: "Sampler[int]", num_rows: int) -> None:
        self.sampler = sampler
        is_distinct = getattr(sampler, "replacement", None) is False and self.per_epoch(num_rows) <= num_rows
        self.rule: Rule = "distinct" if is_distinct else "any"
        self._iterator: Iterator[int] | None = None

    def before(self, epoch: int, position: int) -> Sequence[int]:
        return ()

    def per_epoch(self, num_rows: int) -> int:
        return len(self.sampler) if isinstance(self.sampler, Sized) else num_rows

    def rest_of_epoch(self, epoch: int, position: int) -> Iterator[int]:
        if self._iterator is None:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            self._iterator = iter(self.sampler)
            if not isinstance(self.sampler, Resumable):
                _exhaust(islice(self._iterator, position))
        return self._iterator

    def end_epoch(self, num_left: int) -> None:
        """Draw the rows left over, and once more, so that a sampler written as a generator runs to its end."""
        if self._iterator is not None:
            _exhaust(islice(self._iterator, max(num_left, 0) + 1))
        self._iterator = None

    def resume(self, epoch: int, num_rows: int) -> None:
        """Redraw all earlier epochs if the sampler has neither state nor `set_epoch`."""
        self._iterator = None
        if not isinstance(self.sampler, Resumable) and not hasattr(self.sampler, "set_epoch"):
            for _ in range(epoch):
                _exhaust(islice(iter(self.sampler), num_rows + 1))


def _exhaust(rows: Iterable[int]) -> None:
    for _ in rows:
        pass


def shuffled_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation that depends only on the arguments (numpy guarantees RandomState's stream)."""
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

    sampler:    determines the order of an epoch's rows instead of `shuffle` and `seed`.
    collate_fn: samples to a batch; None uses the dataset's own `collate_fn` if it has one, else the built-in one.
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
            "training steps; set data.dataloader_num_workers=0"
        )

    def seeded_order(epoch: int) -> Sequence[int]:
        return shuffled_order(num_rows, seed, epoch) if shuffle else range(num_rows)

    loader = StatefulLoader(
        dataset,
        batch_size,
        order=seeded_order if sampler is None else sampler,
        settings={"number of rows": num_rows, "data.shuffle": shuffle, "data.seed": seed},
        num_workers=num_workers,
        drop_last=drop_last,
        collate=collate_fn or getattr(dataset, "collate_fn", None) or collate_samples,
    )
    if drop_last and loader.num_rows < batch_size:
        whose = "the dataset has" if loader.num_rows == num_rows else f"{type(sampler).__name__} yields"
        raise ValueError(
            f"data.train_batch_size={batch_size}, but {whose} only {loader.num_rows} rows: not one full batch. "
            f"Set data.train_batch_size to at most {loader.num_rows}"
        )
    return loader


def create_train_loader(config: PPOConfig, dataset: Dataset[Any], sampler: Any, collate_fn: Any) -> StatefulLoader:
    """Batches of the prompts that a step generates; ValueError if the dataset has too few rows for one."""
    data = config.data
    assert isinstance(dataset, Sized)
    batch_size, num_rows = prompts_per_batch(config), len(dataset)
    if (data.gen_batch_size or data.train_batch_size) <= num_rows < batch_size:
        rate = config.actor_rollout_ref.rollout.over_sample_rate
        raise ValueError(
            f"actor_rollout_ref.rollout.over_sample_rate={rate:g}: a step generates {batch_size} prompts, but the dataset has "
            f"only {num_rows} rows; lower it, or data.train_batch_size={data.train_batch_size}"
        )
    return create_dataloader(
        dataset,
        batch_size=batch_size,
        shuffle=data.shuffle,
        seed=config.trainer.seed if data.seed is None else data.seed,
        num_workers=data.dataloader_num_workers,
        drop_last=True,
        sampler=sampler,
        collate_fn=collate_fn,
    )
