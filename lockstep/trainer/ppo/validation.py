"""Validation: responses to the validation prompts, their scores, and metrics.

val loader ─► generate (rollout.val_kwargs) ─► val_reward_fn ─► val-core/… and val-aux/…
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lockstep.config.ppo import PPOConfig
from lockstep.data.loader import Collate, shuffled_order
from lockstep.data.rl_dataset import collate_fn as collate_samples
from lockstep.observability.image_files import write_images
from lockstep.observability.rollout_log import dump_generations
from lockstep.protocol import DataProto
from lockstep.protocol.images import IMAGES
from lockstep.protocol.tokens import lengths_of, read, row_chunks, row_sums, token_rows
from lockstep.trainer.ppo.agent_rollout import COUNT_COLUMNS
from lockstep.trainer.ppo.metrics import CONVERSATION_COLUMNS, name_validation_metrics, process_validation_metrics
from lockstep.trainer.ppo.sampling import FailureLimit, RewardFn, Sampling, extra_columns, fill_failed
from lockstep.trainer.ppo.token_dump import TokenDump
from lockstep.utils.decoding import decode_all
from lockstep.utils.progress import waiting


@dataclass
class Responses:
    """One entry per response, in the order of generation.

    details: index of the row in its data set, length in tokens, finish reason, messages after the prompt, rewards of turns and
             tools and counts of a conversation, and in training the advantage (mean over the response's tokens).
    extra:   the reward function's other results.
    images:  files of those of the prompt and of tools' results.
    """

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    ground_truths: list[Any] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    data_sources: list[str] = field(default_factory=list)
    details: dict[str, list[Any]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    images: list[tuple[bytes, ...]] = field(default_factory=list)

    @classmethod
    def of(
        cls, batches: Iterable[DataProto], tokenizer: PreTrainedTokenizerBase, tokens: TokenDump | None = None
    ) -> "Responses":
        """Those of scored batches, whose tokens are added to `tokens`."""
        responses = cls()
        for batch in batches:
            responses.add(batch, lambda rows: decode_all(tokenizer, [row.tolist() for row in rows]))
            if tokens is not None:
                tokens.add(batch, responses.uids[-len(batch) :])
        return responses

    def add(self, batch: DataProto, decode: Callable[[list[Tensor]], list[str]]) -> None:
        """Append the responses of a scored batch."""
        tensors, columns, done = batch.tensors, batch.non_tensor_batch, len(self.scores)
        self.inputs += decode(token_rows(tensors, "prompts"))
        self.outputs += decode(token_rows(tensors, "responses"))
        self.scores += row_sums(tensors, "token_level_scores").tolist()
        self.uids += [f"{done}:{uid}" for uid in columns["uid"]]
        self.data_sources += [str(source) for source in columns["data_source"]]
        images = columns[IMAGES] if IMAGES in columns else [None] * len(batch)
        self.images += [() if of_row is None else of_row.files for of_row in images]
        self.ground_truths += [(r or {}).get("ground_truth") for r in columns["reward_model"]]
        for target, found in ((self.details, _details(batch)), (self.extra, extra_columns(batch))):
            for name, values in found.items():
                target.setdefault(name, [None] * done).extend(values)
            for values in target.values():  # columns that this batch lacks
                values.extend([None] * (len(self.scores) - len(values)))
        self.extra = fill_failed(self.extra)  # a batch whose rows all failed has none of the function's columns

    def metrics(self) -> dict[str, float]:
        """`val-core/{source}/{acc or reward}/…` for the main metrics, `val-aux/…` for the rest."""
        return name_validation_metrics(process_validation_metrics(self.data_sources, self.uids, self.variables))

    def dump(self, folder: str, step: int) -> None:
        """Write them to `{step}.jsonl` in the folder, and their images next to it."""
        texts, details = (self.inputs, self.outputs, self.ground_truths), self.dumped_details
        if any(self.images):
            details["images"] = write_images(Path(folder).expanduser(), self.images)
        dump_generations(*texts, self.scores, details, self.extra, folder, step)

    @property
    def dumped_details(self) -> dict[str, list[Any]]:
        """`uid`, `data_source` and the details, without counters that are 0 for all responses."""
        counters = COUNT_COLUMNS.values()
        details = {name: values for name, values in self.details.items() if name not in counters or any(values)}
        return {"uid": self.uids, "data_source": self.data_sources} | details

    @property
    def variables(self) -> dict[str, list[Any]]:
        """What metrics are computed of: one value per response, or None."""
        return {"reward": self.scores, **self.extra}


def validate(
    config: PPOConfig,
    sampling: Sampling,
    reward_fn: RewardFn,
    dataset: Any,
    collate_fn: Collate | None,
    tokenizer: PreTrainedTokenizerBase,
    tracking: Any,
    step: int,
) -> dict[str, float]:
    """Answer and score all rows of the dataset; dumps the responses, and logs some as a table, as the config says."""
    data, num_rows = config.data, len(dataset)
    batch_size, n = data.val_batch_size or num_rows, config.actor_rollout_ref.rollout.val_kwargs.n
    limited = FailureLimit(reward_fn, n * min(batch_size, num_rows))
    shuffled = shuffled_order(num_rows, config.trainer.seed, epoch=0) if data.validation_shuffle else None
    batches = prompt_batches(dataset, shuffled or range(num_rows), batch_size, collate_fn)
    scored = (
        sampling.score(sampling.generate_for_validation(prompts, rows, step=step), limited) for rows, prompts in batches
    )
    folder = config.trainer.validation_data_dir
    tokens = TokenDump.asked_for(config.trainer, tokenizer) if folder is not None else None
    responses = Responses.of(scored, tokenizer, tokens)
    if folder is not None and tokens is not None:
        responses.dump(folder, step)
        tokens.write(folder, step)
    if (num_logged := config.trainer.log_val_generations) > 0:
        samples = list(zip(responses.inputs, responses.outputs, responses.scores))[:num_logged]
        tracking.log_table("val/generations", ["input", "output", "score"], samples, step)
    return responses.metrics()


def prompt_batches(
    dataset: Any, rows: Sequence[int], batch_size: int, collate_fn: Collate | None = None
) -> Iterator[tuple[Sequence[int], DataProto]]:
    """The rows of a dataset in batches, with their numbers.

    collate_fn: None uses the dataset's own `collate_fn` if it has one, else the built-in one.
    """
    collate = collate_fn or getattr(dataset, "collate_fn", None) or collate_samples
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        with waiting("data loader", type(dataset).__name__):
            samples = collate([dataset[row] for row in part])
        yield part, DataProto.from_single_dict(samples)


def response_texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[int]]:
    """The text of each response, as the reward function gets it, and its length in tokens."""
    rows = [row.tolist() for row in token_rows(batch.tensors, "responses")]
    return decode_all(tokenizer, rows), [len(row) for row in rows]


def _details(batch: DataProto) -> dict[str, list[Any]]:
    tensors, columns = batch.tensors, batch.non_tensor_batch
    names = {"index": "index", "finish_reason": "finish_reason"} | CONVERSATION_COLUMNS
    found: dict[str, list[Any]] = {name: list(columns[key]) for key, name in names.items() if key in columns}
    if any(len(messages) > 1 for messages in columns.get("messages", ())):
        found["messages"] = list(columns["messages"])
    if any(map(any, columns.get("turn_rewards", ()))):
        found["turn_rewards"] = list(columns["turn_rewards"])
    if any(columns.get("reward_scores", ())):
        found["reward_scores"] = list(columns["reward_scores"])
    found["length"] = lengths_of(tensors)[1].tolist()
    if "advantages" in tensors:
        found["advantage"] = []
        for part in row_chunks(tensors):
            advantages, mask = (read(part, name) for name in ("advantages", "response_mask"))
            found["advantage"] += ((advantages * mask).sum(-1) / mask.sum(-1).clamp_min(1)).tolist()
    return found
