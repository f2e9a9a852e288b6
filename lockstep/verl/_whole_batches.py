"""Worker groups as programs on verl call them: whole batches in, whole batches out.

    fit of a program ──► WholeBatchGroup ── mini-batches, futures, sampling seeds ──► worker group

Batches are balanced over the ranks inside these calls, and `generate_sequences` returns one response per row. Behind the group is
the trainer, or `ByHand` for one that the program built itself.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from lockstep.algorithms.compute_advantage import compute_response_mask
from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.engines.rollout import ROLLOUT_ENGINES
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.images import IMAGES
from lockstep.protocol.tokens import image_keys, without_empty_images
from lockstep.single_controller import WorkerGroup
from lockstep.trainer.ppo.mini_batches import lay_out, loss_preparation, mini_batches_of
from lockstep.verl.protocol import adopt

FORWARD_KEYS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
ADAPTED = (
    "generate_sequences",
    "compute_log_prob",
    "compute_ref_log_prob",
    "compute_values",
    "compute_rm_score",
    "compute_scores",
    "update_actor",
    "update_critic",
)
"""The methods of WholeBatchGroup."""


class PendingBatch:
    """The result of a forward pass: used like a DataProto, it waits when it is first read."""

    def __init__(self, future: Any) -> None:
        self._future = future
        self._result: DataProto | None = None

    def get(self) -> DataProto:
        if self._result is None:
            self._result = adopt(self._future.get())
        return self._result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)

    def __len__(self) -> int:
        return len(self.get())

    def __getitem__(self, item: Any) -> Any:
        return self.get()[item]


class Caller(Protocol):
    """What a group of whole batches asks about the run."""

    def generate(self, group: WorkerGroup, prompts: DataProto) -> DataProto: ...

    def is_reference(self, group: WorkerGroup) -> bool: ...

    def reference(self, group: WorkerGroup) -> WorkerGroup: ...

    def update(self, role: str, group: WorkerGroup, data: DataProto) -> Any: ...


class WholeBatchGroup:
    """See the module docstring; everything else is the group's own."""

    def __init__(self, group: Any, caller: Caller) -> None:
        self._group, self._caller = group, caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response per row, with its images. meta_info: `validate` samples as validation does, `do_sample=False` greedily."""
        output = adopt(self._caller.generate(self._group, prompts))
        if IMAGES in prompts.non_tensor_batch:  # programs take it from their batch together with the prompts
            output.non_tensor_batch.setdefault(IMAGES, prompts.non_tensor_batch[IMAGES])
        output.meta_info.setdefault("timing", {})
        return output

    def compute_log_prob(self, data: DataProto) -> PendingBatch:
        """`old_log_probs` and `entropys`; of a reference policy's own group `ref_log_prob`."""
        if self._caller.is_reference(self._group):
            return self.compute_ref_log_prob(data)
        return PendingBatch(self._group.compute_log_prob(_forward_inputs(data)))

    def compute_ref_log_prob(self, data: DataProto) -> PendingBatch:
        """Also of the actor's group, whatever group has the reference."""
        reference: Any = self._caller.reference(self._group)
        return PendingBatch(reference.compute_ref_log_prob(_forward_inputs(data)))

    def compute_values(self, data: DataProto) -> PendingBatch:
        return PendingBatch(self._group.compute_values(_forward_inputs(data)))

    def compute_rm_score(self, data: DataProto) -> PendingBatch:
        return PendingBatch(self._group.compute_rm_score(without_empty_images(data)))

    compute_scores = compute_rm_score

    def update_actor(self, data: DataProto) -> Any:
        return self._caller.update("actor", self._group, data)

    def update_critic(self, data: DataProto) -> Any:
        return self._caller.update("critic", self._group, data)


class ByHand:
    """The caller of a group that a program built from worker classes. config: that of its workers; role: theirs."""

    def __init__(self, config: Any, role: str) -> None:
        self.config, self.role = config, role
        self._draws: dict[int, int] = {}
        self._num_updates = 0

    @cached_property
    def _tokenizer(self) -> Any:
        model = self.config.model
        return hf_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)

    def generate(self, group: Any, prompts: DataProto) -> DataProto:
        rollout = self.config.rollout
        if self.role != "rollout" and not ROLLOUT_ENGINES.info(rollout.name).shares_weights:
            raise ValueError(
                f"actor_rollout_ref.rollout.name={rollout.name}: its weights are sent by the trainer, and this worker group was "
                "built by hand; use rollout.name=embedded, or RayPPOTrainer.init_workers and fit"
            )
        step = int(prompts.meta_info.get("global_steps", self._num_updates))
        draw = self._draws[step] = self._draws.get(step, 0) + 1
        output: DataProto = group.generate_sequences(
            rollout_inputs(prompts, lambda: self._tokenizer, rollout.seed, step, draw)
        )
        return output

    def is_reference(self, group: WorkerGroup) -> bool:
        return self.role == "ref"

    def reference(self, group: WorkerGroup) -> WorkerGroup:
        has_adapters = isinstance(self.config, ActorRolloutRefConfig) and self.config.model.lora_rank > 0
        if self.role not in ("ref", "actor_rollout_ref") and not has_adapters:
            raise ValueError(
                f"compute_ref_log_prob: workers of role={self.role!r} have no reference policy; construct them with "
                "role='actor_rollout_ref', or call the group of role='ref'"
            )
        return group

    def update(self, role: str, group: Any, data: DataProto) -> Any:
        section = self.config.actor if role == "actor" else self.config
        num_samples = self.config.rollout.n if role == "actor" else getattr(self.config, "rollout_n", 1)
        prepare = loss_preparation(section, self._num_updates) if role == "actor" else None
        self._num_updates += 1
        rule = mini_batches_of(section, num_samples, self._num_updates, prepare)
        laid_out = lay_out(update_inputs(data), rule, group.mesh(role).dp_size, balance=True)
        return adopt(getattr(group, f"update_{role}")(laid_out).get())


def rollout_inputs(prompts: DataProto, tokenizer: Callable[[], Any], seed: int, step: int, draw: int) -> DataProto:
    """What the rollout worker needs, from the columns that programs on verl have in a batch of prompts.

    draw: the number of this call in the step, which selects the random numbers.
    """
    ids = object_array(_prompt_ids(prompts, tokenizer))
    images = {name: prompts.non_tensor_batch[name] for name in (IMAGES,) if name in prompts.non_tensor_batch}
    return sampling_inputs({"raw_prompt_ids": ids} | images, prompts.meta_info, seed, step, draw)


def sampling_inputs(columns: dict[str, Any], info: Mapping[str, Any], seed: int, step: int, draw: int) -> DataProto:
    """Rows with their seeds. info: of the program's batch, with `validate` and `do_sample`."""
    validate = bool(info.get("validate", False))
    num_rows = len(columns["raw_prompt_ids"])
    words = np.random.SeedSequence([seed, step, draw, int(validate)]).generate_state(num_rows, np.uint64)
    seeds = torch.from_numpy((words >> 1).astype(np.int64))
    greedy = not info.get("do_sample", True) and not validate
    meta = {"validate": validate, "greedy": greedy, "global_steps": step}
    return DataProto.from_dict({"sampling_seed": seeds}, columns, meta)


def _prompt_ids(prompts: DataProto, tokenizer: Callable[[], Any]) -> Sequence[Any]:
    columns, tensors = prompts.non_tensor_batch, prompts.batch
    if "raw_prompt_ids" in columns:
        return list(columns["raw_prompt_ids"])
    if tensors is not None and "input_ids" in tensors:
        pairs = zip(tensors["input_ids"], tensors["attention_mask"])
        return [row[mask.bool()].tolist() for row, mask in pairs]
    if "raw_prompt" in columns:
        encode = tokenizer().apply_chat_template
        texts = [encode(list(chat), add_generation_prompt=True, tokenize=False) for chat in columns["raw_prompt"]]
        ids: list[Any] = tokenizer()(texts, add_special_tokens=False)["input_ids"]
        return ids
    raise ValueError(
        f"generate_sequences needs raw_prompt_ids, input_ids or raw_prompt; got {sorted(prompts._columns())}"
    )


def update_inputs(data: DataProto) -> DataProto:
    """The batch of an update, of which nothing is known about the rollout's log-probs."""
    batch = data.select()
    batch.meta_info["rollout_gap"] = "none"
    return batch


def _forward_inputs(data: DataProto) -> DataProto:
    if "response_mask" not in data.tensors:
        data.tensors["response_mask"] = compute_response_mask(data)
    return data.select(FORWARD_KEYS, image_keys(data))
