"""The mini-batches of an update, as laid out by the controller, and metrics over them."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from lockstep.config.micro_batches import RL
from lockstep.engines.train.micro_batch_limits import MicroBatchLimits
from lockstep.engines.train.token_engine import TokenEngine
from lockstep.engines.train.train_engine import MicroBatching, TrainEngine
from lockstep.protocol import DataProto
from lockstep.protocol.columns import Batch
from lockstep.protocol.tokens import with_images
from lockstep.utils.progress import phase


def micro_batching(phase: str, num_rows: int | None, use_dynamic_bsz: bool | None, max_tokens: int) -> MicroBatching:
    """phase: whose keys these are (`config/micro_batches.py`)."""
    if use_dynamic_bsz:
        return MicroBatching(max_tokens=max_tokens, key=RL[phase].tokens)
    return MicroBatching(num_rows=num_rows, key=RL[phase].rows)


def limits_of(*engines: TrainEngine | None) -> list[MicroBatchLimits]:
    """The limits on micro-batches after out of memory, of engines that have them; None is skipped."""
    distinct = {id(engine): engine for engine in engines}
    return [engine.limits for engine in distinct.values() if isinstance(engine, TokenEngine)]


def num_mini_batches(data: DataProto) -> int:
    """Of the update: optimizer steps that it takes."""
    return int(data.meta_info["num_repeats"]) * len(data.meta_info["mini_batches"])


def mini_batches(data: DataProto, loss_scale_factor: float | None = None) -> Iterator[tuple[Batch, dict[str, Any]]]:
    """This rank's rows of each mini-batch, and the counts over all ranks that normalize its loss."""
    batch = with_images(data)
    number, all_counts = data.tensors["mini_batch"], data.meta_info["mini_batches"]
    num_steps = num_mini_batches(data)
    for step in range(num_steps):
        i = step % len(all_counts)
        rows = batch if len(all_counts) == 1 else batch[number == i]
        with phase(f"mini-batch {step + 1} of {num_steps}:") if num_steps > 1 else nullcontext():
            yield rows, {"dp_size": 1, **all_counts[i], "loss_scale_factor": loss_scale_factor}


def token_share(mask: Tensor, info: dict[str, Any]) -> Tensor:
    """Fraction of the mini-batch's tokens in this micro-batch: the weight of a token mean over the micro-batch."""
    return mask.sum() / max(info["batch_num_tokens"], 1)


class MetricMeans:
    """Means over the optimizer steps of one update."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def __len__(self) -> int:
        """Steps that were added."""
        return max(map(len, self._values.values()), default=0)

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value)

    def result(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._values.items()}
