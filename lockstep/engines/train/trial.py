"""The audit `micro_batch_split`: loss and gradient of a few rows, computed by the engine in one and in two micro-batches.

    a mini-batch ─► its cheapest rows that follow each other ─► `TrainEngine.trial`: one micro-batch, two ─► the same?

What packing, shared prompts, checkpointing and the loss do to a row must not depend on the rows beside it.
"""

from collections.abc import Iterable
from math import isfinite

import torch
from torch import Tensor

from lockstep.engines.train.token_engine import TokenEngine, taken_rows
from lockstep.engines.train.train_engine import LossFn, MicroBatching, TrainEngine
from lockstep.protocol.columns import Batch
from lockstep.protocol.tokens import lengths_of, row_sums
from lockstep.utils.distributed import least_of_ranks, summed_over_ranks

WIDTH = 65_521
"""Numbers in a sketch."""


def folded(tensors: Iterable[Tensor]) -> Tensor:
    """A sketch (WIDTH,) of tensors: sums of their entries with random signs. The distance of two sketches is close to that of what
    they are of."""
    total = torch.zeros(WIDTH)
    for number, tensor in enumerate(tensors):
        generator = torch.Generator().manual_seed(number)
        signs = (2 * torch.randint(0, 2, (WIDTH,), generator=generator) - 1).to(tensor.device, torch.float32)
        flat = tensor.detach().flatten()
        num_rows, rest = divmod(len(flat), WIDTH)
        part = flat[: num_rows * WIDTH].view(num_rows, WIDTH).sum(0, dtype=torch.float32)
        part[:rest] += flat[num_rows * WIDTH :]
        total = total.to(tensor.device) + signs * part
    return total


def split_tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """The relative difference of a gradient that rounding explains; one that depends on the split is off by 0.3 to 1."""
    if dtype != torch.float32:
        return 0.2  # products of other shapes round differently: 0.01 to 0.05
    return 1e-3 if device.type == "cpu" else 1e-2  # which TF32 needs


class SplitTrials:
    """Chooses when to compare, and which rows: in the first updates, then as often as `SHARE` allows.

    Counts rows, of which every rank has the same number.
    """

    SHARE = 0.002
    """Rows of trials, as a share of those trained."""
    FIRST = 2
    """Updates at the start that are checked whatever it costs; more if their gradient was zero, up to twice as many."""
    MAX_GROUPS = 4

    def __init__(self, engine: TrainEngine, tolerance: float) -> None:
        self.engine = engine
        self.tolerance = tolerance
        self.num_checked = 0
        self._num_trials = 0
        self._num_rows = 0
        self._num_trained = 0

    def problem(self, batch: Batch, loss_fn: LossFn, micro: MicroBatching, **options: object) -> str | None:
        """What differs, if a check is due and finds something. Collective; all ranks return the same."""
        if isinstance(self.engine, TokenEngine):
            micro = self.engine.limits.within(micro)
        self._num_trained += len(batch)
        is_first = self.num_checked < self.FIRST and self._num_trials < 2 * self.FIRST
        if not is_first and self._num_rows + 4 * self.MAX_GROUPS * micro.group_size > self.SHARE * self._num_trained:
            return None
        rows = self._rows(batch, micro)
        if rows is None:
            return None
        self._num_trials += 1
        self._num_rows += 2 * len(rows)
        part = taken_rows(batch, rows)
        half = len(rows) // 2

        def trial(first: int, last: int, num_rows: int) -> tuple[float, Tensor]:
            split = MicroBatching(num_rows=num_rows, group_size=micro.group_size)
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            with torch.random.fork_rng(devices=devices):
                return self.engine.trial(part[first:last], loss_fn, split, **options)

        loss, gradient = trial(0, len(rows), len(rows))
        other_loss, other_gradient = trial(0, len(rows), half)
        distance, size, other = _norms(gradient - other_gradient, gradient, other_gradient)
        largest = max(size, other)
        if not isfinite(distance + loss + other_loss) or not largest:
            return None  # float16 out of range, or rows without a gradient: other rows are tried next time
        self.num_checked += 1
        if distance <= self.tolerance * largest and abs(loss - other_loss) <= self.tolerance * (abs(loss) + largest):
            return None
        # Gradients of rows can cancel out; measured by those of the halves, rounding is small.
        halves = [trial(0, half, half), trial(half, len(rows), half)]
        largest = sum(_norms(*(of_half for _, of_half in halves)))
        allowed = self.tolerance * (largest + sum(abs(of_half) for of_half, _ in halves))
        if distance <= self.tolerance * largest and abs(loss - other_loss) <= allowed:
            return None
        return (
            f"loss and gradient depend on the micro-batch split: {len(rows)} rows per rank have a loss of {loss:.4g} (gradient "
            f"{size:.4g}) in one micro-batch, and of {other_loss:.4g} ({other:.4g}) in two; the gradients differ by "
            f"{distance / largest:.2g} of their size, rounding by less than {self.tolerance:g}. A loss must be a sum over rows, "
            "divided by counts of the whole mini-batch, and a row's outputs must not depend on the rows packed beside it"
        )

    def _rows(self, batch: Batch, micro: MicroBatching) -> list[int] | None:
        """Rows that follow each other, as many on every rank, that fit a micro-batch; None if no two do. Collective."""
        group = micro.group_size
        before, own = lengths_of(batch)
        lengths = before + own
        tokens = lengths.view(-1, group).sum(1)
        is_data = (row_sums(batch, "response_mask") > 0).view(-1, group).any(1)
        limit = micro.max_tokens or (micro.num_rows or len(batch)) * int(lengths.max())

        def windows(num_groups: int) -> list[int]:
            """First groups of runs that fit; those with the most data first, then the shortest."""
            if num_groups > len(tokens):
                return []
            sums, data = (each.unfold(0, num_groups, 1).sum(1).tolist() for each in (tokens, is_data.long()))
            fitting = [start for start, size in enumerate(sums) if size <= limit]
            most = max((data[start] for start in fitting), default=0)
            return sorted((start for start in fitting if data[start] == most), key=sums.__getitem__)

        num_groups = least_of_ranks(next((n for n in (self.MAX_GROUPS, 2) if windows(n)), 0))
        if not num_groups:
            return None
        found = windows(num_groups)
        start = found[self._num_trials % len(found)] * group
        return list(range(start, start + num_groups * group))


def _norms(*sketches: Tensor) -> list[float]:
    """Of what all ranks have together."""
    squares = summed_over_ranks(*(float(sketch.double().square().sum()) for sketch in sketches))
    return [square**0.5 for square in squares]
