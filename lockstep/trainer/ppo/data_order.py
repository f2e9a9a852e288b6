"""The audit `data_order` between the data and a step: what was drawn is trained on once, unless it is dropped on purpose.

loader ─► drawn ─► [ live in an asynchronous source ] ─► trained on, or dropped: filter_groups, over_sample_rate, too stale
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from lockstep.config.ppo import PPOConfig
from lockstep.data.loader import StatefulLoader
from lockstep.data.rl_dataset import RLHFDataset, collate_fn
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.rollout_sources import RolloutSource
from lockstep.utils.audit import Audits

INDEX = "index"


class DrawnPrompts:
    """The prompts of a run that no step has trained on, by `index`, which need not be unique. Batches without it are not followed.

    loader: None if the run does not train.
    """

    def __init__(self, config: PPOConfig, loader: StatefulLoader | None) -> None:
        self.loader = loader
        self.num_samples = config.actor_rollout_ref.rollout.n
        filters = config.algorithm.filter_groups.enable
        self.may_drop = filters or config.actor_rollout_ref.rollout.over_sample_rate > 0
        self.source: RolloutSource | None = None
        self._pending: Counter[str] = Counter()
        self._num_lost = 0
        self._indices = _indices_of(loader) if loader is not None else None

    def start(self, source: RolloutSource) -> None:
        """The source of the samples, which may have prompts of a checkpoint."""
        self.source = source
        self._pending = _counted(source.pending())

    def draw(self, audits: Audits, batch: DataProto) -> None:
        """A batch came from the loader."""
        assert self.loader is not None
        if (problem := self.loader.ledger.take_problem()) is not None:
            audits.found("data_order", problem)
        if INDEX not in batch.non_tensor_batch:
            return
        self._pending += _counted([batch])
        if self._indices is None:
            return
        for row, index in zip(self.loader.drawn, batch.non_tensor_batch[INDEX]):
            if str(index) != str(self._indices[row]):
                audits.found(
                    "data_order",
                    f"the sampler drew row {row} of the dataset, whose index is {self._indices[row]!r}, but the batch has index "
                    f"{index!r} there: the loader mixes up rows",
                )
                return

    def check(self, audits: Audits, batch: DataProto) -> None:
        """A step trains on this batch, one row per conversation."""
        if INDEX not in batch.non_tensor_batch or self.source is None:
            return
        num_rows = Counter(map(str, batch.non_tensor_batch[INDEX]))
        trained = Counter({index: -(-count // self.num_samples) for index, count in num_rows.items()})
        if "uid" in batch.non_tensor_batch:  # prompts of the same index, whose groups may have fewer rows
            groups = set(zip(map(str, batch.non_tensor_batch[INDEX]), batch.non_tensor_batch["uid"]))
            trained |= Counter(index for index, _ in groups)
        if again := trained - self._pending:
            index, times = again.most_common(1)[0]
            audits.found(
                "data_order",
                f"the step trains on row {index} {times} time(s) more than it was drawn from the data ({len(again)} rows are)",
            )
        least = self.source.num_dropped
        live = _counted(self.source.pending())
        most = self.source.num_dropped
        lost = self._pending - trained - live
        self._num_lost += lost.total()
        self._pending = live
        if self.may_drop and not self.source.keeps_prompts:
            return
        if not least <= self._num_lost <= most:
            examples = ", ".join(list(lost)[:3])
            num_lost, self._num_lost = self._num_lost, most  # so that it is told once
            audits.found(
                "data_order",
                f"{num_lost} prompts were drawn and neither trained on nor kept, but {most} were dropped on purpose"
                + (f"; rows {examples}" if examples else ""),
            )


def _counted(batches: Iterable[DataProto]) -> Counter[str]:
    return Counter(str(index) for batch in batches for index in batch.non_tensor_batch.get(INDEX, ()))


def _indices_of(loader: StatefulLoader) -> list[Any] | None:
    """The index of each row; None with a dataset or collate_fn of the user's own, which may number and sort rows as they like."""
    dataset: Any = loader.dataset
    if type(dataset) is not RLHFDataset or loader.collate is not collate_fn:
        return None
    of_rows = [(position, (row.columns.get("extra_info") or {}).get(INDEX)) for position, row in dataset.rows]
    return [position if index is None else index for position, index in of_rows]
