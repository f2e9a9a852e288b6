"""Validation: responses to the validation prompts, their scores, and metrics.

val loader ─► generate (rollout.val_kwargs) ─► val_reward_fn ─► val-core/… and val-aux/…
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.metrics import name_validation_metrics, process_validation_metrics
from lockstep.trainer.ppo.sampling import extra_columns


@dataclass
class Responses:
    """One entry per response, in the order of generation."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    ground_truths: list[Any] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    data_sources: list[str] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, batch: DataProto, decode: Callable[[list[Tensor]], list[str]]) -> None:
        """Append the responses of a scored batch."""
        tensors, columns, done = batch.tensors, batch.non_tensor_batch, len(self.scores)
        width = tensors["prompts"].shape[1]
        self.inputs += decode(valid_tokens(tensors["prompts"], tensors["attention_mask"][:, :width]))
        self.outputs += decode(valid_tokens(tensors["responses"], tensors["attention_mask"][:, width:]))
        self.scores += tensors["token_level_scores"].sum(-1).tolist()
        self.uids += [f"{done}:{uid}" for uid in columns["uid"]]
        self.data_sources += [str(source) for source in columns["data_source"]]
        self.ground_truths += [(r or {}).get("ground_truth") for r in columns["reward_model"]]
        for name, values in extra_columns(batch).items():
            self.extra.setdefault(name, [None] * done).extend(values)
        for values in self.extra.values():  # columns that this batch lacks
            values.extend([None] * (len(self.scores) - len(values)))

    def metrics(self) -> dict[str, float]:
        """`val-core/{source}/{acc or reward}/…` for the main metrics, `val-aux/…` for the rest."""
        infos: dict[str, list[Any]] = {"reward": self.scores, **self.extra}
        return name_validation_metrics(process_validation_metrics(self.data_sources, self.uids, infos))


def valid_tokens(ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Each row's tokens without padding."""
    return [row[keep.bool()] for row, keep in zip(ids, mask)]
