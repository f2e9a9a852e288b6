"""Validation: generate answers to the validation prompts, score them, reduce the scores to metrics.

val loader ─► generate (rollout.val_kwargs) ─► val_reward_fn ─► val-core/… and val-aux/…
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.metrics import name_validation_metrics, process_validation_metrics


@dataclass
class ValidationSamples:
    """One entry an answer, in the order of generation."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    ground_truths: list[Any] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    data_sources: list[str] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def add_extra(self, infos: dict[str, list[Any]], num_rows: int) -> None:
        """Columns of one batch; a column that a batch lacks holds None there."""
        done = len(self.scores) - num_rows
        for name, values in infos.items():
            self.extra.setdefault(name, [None] * done).extend(values)
        for values in self.extra.values():
            values.extend([None] * (len(self.scores) - len(values)))


def collect_samples(
    batches: Iterable[DataProto],
    generate: Callable[[DataProto], DataProto],
    score: Callable[[DataProto], tuple[Any, dict[str, list[Any]]]],
    decode: Callable[[Any], list[str]],
) -> ValidationSamples:
    """generate: prompts -> the batch with responses; score: that batch -> (token scores, extra columns)."""
    samples = ValidationSamples()
    for prompts in batches:
        batch = generate(prompts)
        reward_tensor, extra = score(batch)
        tensors = batch.tensors
        prompt_mask = tensors["attention_mask"][:, : tensors["prompts"].shape[1]]
        samples.inputs += decode(valid_tokens(tensors["prompts"], prompt_mask))
        samples.outputs += decode(valid_tokens(tensors["responses"], tensors["response_mask"]))
        samples.scores += reward_tensor.sum(-1).tolist()
        columns = batch.non_tensor_batch
        samples.uids += list(columns["uid"])
        samples.data_sources += [str(s) for s in columns["data_source"]]
        samples.ground_truths += [(r or {}).get("ground_truth") for r in columns["reward_model"]]
        samples.add_extra(extra, len(batch))
    return samples


def validation_metrics(samples: ValidationSamples) -> dict[str, float]:
    """`val-core/{source}/{acc or reward}/…` for the metric to watch, `val-aux/…` for the rest."""
    infos: dict[str, list[Any]] = {"reward": samples.scores, **samples.extra}
    return name_validation_metrics(process_validation_metrics(samples.data_sources, samples.uids, infos))


def valid_tokens(ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Each row's tokens without its padding."""
    return [row[keep.bool()] for row, keep in zip(ids, mask)]
