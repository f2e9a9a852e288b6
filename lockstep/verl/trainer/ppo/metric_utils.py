"""verl.trainer.ppo.metric_utils"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.trainer.ppo.metrics import (
    BOOTSTRAP_SEED,
    NUM_BOOTSTRAP,
    compute_data_metrics as compute_data_metrics,
    compute_throughout_metrics as compute_throughout_metrics,
    compute_timing_metrics as compute_timing_metrics,
    process_validation_metrics as process_validation_metrics,
)
from lockstep.verl.utils.metric import reduce_metrics as reduce_metrics


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], float]],
    n_bootstrap: int = NUM_BOOTSTRAP,
    seed: int = BOOTSTRAP_SEED,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each function over subsets of `data`, drawn with replacement."""
    draws = np.random.RandomState(seed).choice(len(data), size=(n_bootstrap, subset_size), replace=True)
    subsets = [[data[i] for i in draw] for draw in draws]
    values = [np.array([reduce(subset) for subset in subsets]) for reduce in reduce_fns]
    return [(float(drawn.mean()), float(drawn.std())) for drawn in values]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the first entry with the most frequent vote; ties go to the vote that comes first."""
    votes: dict[Any, list[Any]] = {}
    for entry in data:
        votes.setdefault(entry[vote_key], []).append(entry[val_key])
    winner: float = max(votes.values(), key=len)[0]
    return winner
