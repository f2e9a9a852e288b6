"""The audit `micro_batch_split`: neither a row's outputs nor the loss depend on which rows are computed together.

    a mini-batch ─► its cheapest rows that follow each other ─► `forward`: one micro-batch, two ─► the same outputs?
                                                                outputs ─► loss of all, of halves ─► the same sum?

Outputs are compared rather than gradients: those of rows cancel out, and near an optimum they are nothing but rounding.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.engines.train.token_engine import TokenEngine, taken_rows
from lockstep.engines.train.train_engine import LossFn, MicroBatching, TrainEngine
from lockstep.protocol.columns import Batch
from lockstep.protocol.tokens import lengths_of, row_sums
from lockstep.utils.audit import AuditError
from lockstep.utils.distributed import least_of_ranks

KEY = "micro_batch_split"
"""Of the trials' micro-batches, whose size nothing else shares."""
OUTPUTS = ("log_probs", "values")
LEAST_TOKENS = 16
"""Fewest tokens that the mean difference of a row is over: a few can differ by more."""
LOSS_TOLERANCE = 1e-3
"""Difference between a loss and the sum of its halves that counts as rounding, relative to the loss and its gradient."""


class SplitCheck:
    """Checks once per run that the loss of some rows, and its gradient, is the sum over two parts of them.

    Losses are summed over micro-batches, so another loss would depend on how many there are.
    report: is told what is wrong; without it that is an AuditError.
    """

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self.is_done = False
        self._report = report

    def __call__(self, loss_fn: LossFn, outputs: dict[str, Tensor], rows: TensorDict, name: str) -> None:
        """Report if they differ; without a gradient, the next micro-batch is checked."""
        if self.is_done:
            return
        if len(rows) == 1:
            outputs = {key: torch.cat((value, value)) for key, value in outputs.items()}
            rows = cast(TensorDict, torch.cat((rows, rows)))
        values = [value.detach().requires_grad_() for value in outputs.values()]

        def loss_and_gradients(*parts: slice) -> list[Tensor]:
            losses = [loss_fn(dict(zip(outputs, (v[part] for v in values))), rows[part])[0] for part in parts]
            total = torch.stack(losses).sum()
            gradients = torch.autograd.grad(total, values, materialize_grads=True) if total.requires_grad else ()
            return [total.detach(), *gradients]

        half = len(rows) // 2
        whole, split = loss_and_gradients(slice(None)), loss_and_gradients(slice(half), slice(half, None))
        scale = max(sum(float(value.abs().sum()) for value in parts) for parts in (whole, split))
        self.is_done = scale > 0
        if any(float((one - two).abs().sum()) > LOSS_TOLERANCE * scale for one, two in zip(whole, split)):
            message = (
                f"{name}: the loss of {len(rows)} rows is {float(whole[0]):.4g} (norm of its gradient {_norm(whole):.4g}), but "
                f"{float(split[0]):.4g} ({_norm(split):.4g}) in two micro-batches. The loss must be a sum over rows, divided by "
                "counts of the whole mini-batch: call `agg_loss(loss_mat, response_mask, loss_agg_mode)`, or divide by "
                "config.global_batch_info"
            )
            if self._report is None:
                raise AuditError(message)
            self._report(message)


def _norm(loss_and_gradients: list[Tensor]) -> float:
    return math.hypot(*(float(gradient.norm()) for gradient in loss_and_gradients[1:]))


def split_tolerance(dtype: torch.dtype, device: torch.device, *, experts: bool = False) -> float:
    """The mean difference of a row's log-probs (or values) that rounding explains.

    experts: rounding also changes which of them compute a token.
    """
    if dtype != torch.float32:
        return 0.3 if experts else 0.1  # products of other shapes round differently: 0.001 to 0.03
    return 1e-3 if device.type == "cpu" else 1e-2  # which TF32 needs


class SplitTrials:
    """Chooses when to compare, and which rows: in the first updates, then as often as `SHARE` allows.

    Counts rows, of which every rank has the same number.
    """

    SHARE = 0.002
    """Rows of trials, as a share of those trained."""
    FIRST = 2
    """Updates at the start that are checked whatever it costs."""
    MAX_GROUPS = 4

    def __init__(self, engine: TrainEngine, tolerance: float) -> None:
        self.engine = engine
        self.tolerance = tolerance
        self.num_checked = 0
        self._num_rows = 0
        self._num_trained = 0

    def problem(self, batch: Batch, loss_fn: LossFn | None, micro: MicroBatching, **options: object) -> str | None:
        """What differs on this rank, if a check is due and finds something. Collective.

        loss_fn: None if it is checked elsewhere.
        """
        if isinstance(self.engine, TokenEngine):
            if KEY in self.engine.limits.sizes:  # the rows of a trial do not fit into memory
                return None
            micro = self.engine.limits.within(micro)
        self._num_trained += len(batch)
        most = 2 * self.MAX_GROUPS * micro.group_size
        if self.num_checked >= self.FIRST and self._num_rows + most > self.SHARE * self._num_trained:
            return None
        rows = self._rows(batch, micro)
        if rows is None:
            return None
        self.num_checked += 1
        self._num_rows += 2 * len(rows)
        part = taken_rows(batch, rows)

        def outputs_of(num_rows: int) -> dict[str, Tensor]:
            split = MicroBatching(num_rows=num_rows, group_size=micro.group_size, key=KEY)
            return self.engine.forward(part, split, **options)

        together, apart = outputs_of(len(rows)), outputs_of(len(rows) // 2)
        columns = part.to_tensordict()
        for name in OUTPUTS:
            if name in together:
                gap = _largest_gap(together[name].float(), apart[name].float(), columns["response_mask"])
                if gap > self.tolerance:  # not of numbers that are not finite: `finite` is for them
                    return (
                        f"{name} depend on the micro-batch split: {len(rows)} rows per rank, computed in one micro-batch and in "
                        f"two, differ by {gap:.3g} in the mean of a row, rounding by less than {self.tolerance:g}. A row's "
                        "outputs must not depend on the rows packed with it"
                    )
        found: list[str] = []
        if loss_fn is not None:
            SplitCheck(found.append)(loss_fn, together, columns, "the loss depends on the micro-batch split")
        return found[0] if found else None

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
        start = found[self.num_checked % len(found)] * group
        return list(range(start, start + num_groups * group))


def _largest_gap(one: Tensor, two: Tensor, mask: Tensor) -> float:
    """The mean difference of the row that differs most, relative to the values if these are large."""
    weights = mask.float() if mask.shape == one.shape else torch.ones_like(one)
    size = float(((one.square() * weights).sum() / weights.sum().clamp_min(1)).sqrt())
    gaps = ((one - two).abs() * weights).sum(1) / weights.sum(1).clamp_min(LEAST_TOKENS)
    return float(gaps.max()) / max(1.0, size)
