"""Mini-batches, and the counts over a mini-batch that make its loss independent of how it is split."""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.engines.train.base import MicroBatching, TrainEngine


def micro_batching(num_rows: int | None, use_dynamic_bsz: bool, max_tokens: int) -> MicroBatching:
    return MicroBatching(max_tokens=max_tokens) if use_dynamic_bsz else MicroBatching(num_rows=num_rows)


def mini_batches(batch: TensorDict, size: int, epochs: int, seed: int | None) -> Iterator[TensorDict]:
    """`epochs` passes over the rows in mini-batches of `size`; the last one of a pass may be smaller.

    seed: of the shuffling before each pass; None keeps the order.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.arange(len(batch)) if generator is None else torch.randperm(len(batch), generator=generator)
        for rows in order.split(size):
            yield batch[rows]


def global_batch_info(rows: TensorDict, engine: TrainEngine, loss_scale_factor: float | None = None) -> dict[str, Any]:
    """The counts by which a loss is divided: over the whole mini-batch and all ranks, agreed before the first backward."""
    mask: Tensor = rows["response_mask"]
    num_tokens, num_sequences = engine.global_sum(float(mask.sum()), float(mask.any(-1).sum()))
    return {
        "dp_size": 1,
        "batch_num_tokens": int(num_tokens),
        "global_batch_size": int(num_sequences),
        "loss_scale_factor": loss_scale_factor,
    }


def token_share(mask: Tensor, info: dict[str, Any]) -> Tensor:
    """The part of the mini-batch's tokens in this micro-batch: what a token mean over the micro-batch weighs."""
    return mask.sum() / max(info["batch_num_tokens"], 1)


class MetricMeans:
    """Means over the optimizer steps of one update."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value)

    def result(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._values.items()}
