"""Conversion between batch and rollout engine: prompts to requests, completions to batch tensors.

raw_prompt_ids, sampling_seed, multi_modal_inputs ──► GenerationRequest … Completion ──► prompts, responses, input_ids,
    attention_mask, position_ids, response_mask, policy_versions, rollout_log_probs, routed_experts

The images of a prompt stay in their row; only a conversation, which may add images, returns the column again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.agents.trajectory import Trajectory
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.protocol import BATCH_KEYS, DataProto, Ragged, object_array
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from lockstep.protocol.images import IMAGES
from lockstep.protocol.ragged import is_ragged
from lockstep.protocol.tokens import lengths_of, shape_of


def sampling_params(config: RolloutConfig, *, validate: bool, greedy: bool) -> SamplingParams:
    """Sampling parameters of training, or of `rollout.val_kwargs`; `greedy` overrides both."""
    source = config.val_kwargs if validate else config
    return SamplingParams(
        temperature=source.temperature if source.do_sample and not greedy else 0.0,
        top_k=source.top_k,
        top_p=source.top_p,
        min_p=source.min_p,
        max_tokens=config.response_length,
        stop_token_ids=tuple(config.stop_token_ids),
        ignore_eos=config.ignore_eos,
    )


def requests_of(prompts: DataProto, sampling: SamplingParams) -> list[GenerationRequest]:
    seeds = prompts.tensors["sampling_seed"].tolist()
    ids = prompts.non_tensor_batch["raw_prompt_ids"]
    images = prompts.non_tensor_batch.get(IMAGES, [None] * len(ids))
    return [GenerationRequest(list(p), sampling, s, i) for p, s, i in zip(ids, seeds, images)]


def group_key(rows: DataProto, number: int) -> str:
    """The same for all samples of a prompt, and for no other prompt in generation: uids are unique within a step."""
    return f"{rows.meta_info['global_steps']} {rows.non_tensor_batch['uid'][number]}"


def batch_of(
    requests: Sequence[GenerationRequest], completions: Sequence[Completion], config: RolloutConfig, pad_token_id: int
) -> DataProto:
    """One row per response."""
    rows = [Trajectory(request.prompt_ids) for request in requests]
    for row, completion in zip(rows, completions, strict=True):
        row.add_sampled(completion)
    reasons = object_array([c.stop_reason for c in completions])
    return DataProto.from_dict(
        tensors=trajectory_tensors(rows, config, pad_token_id), non_tensors={"finish_reason": reasons}
    )


def trajectory_tensors(
    rows: Sequence[Trajectory], config: RolloutConfig, pad_token_id: int
) -> dict[str, Tensor | Ragged]:
    """Without padding; padded, prompts have `rollout.prompt_length` places and responses `rollout.response_length`."""
    length = config.response_length
    columns: dict[str, Tensor | Ragged] = {
        "prompts": _column("prompts", [row.prompt_ids for row in rows], config.prompt_length, pad_token_id),
        "responses": _column("responses", [row.response_ids for row in rows], length, pad_token_id),
        "response_mask": _entries("response_mask", [row.response_mask for row in rows], length),
        "policy_version": torch.tensor([row.policy_version for row in rows], dtype=torch.int64),
        "policy_versions": _entries("policy_versions", [row.policy_versions for row in rows], length),
    }
    if config.calculate_log_probs:
        columns["rollout_log_probs"] = _entries("rollout_log_probs", [row.log_probs for row in rows], length)
    if config.enable_rollout_routing_replay:
        lengths = [len(row.ids) for row in rows]
        columns["routed_experts"] = route_column([row.routes for row in rows], lengths, config.prompt_length + length)
    return columns


def recorded_routes(routes: Tensor, data: DataProto) -> Tensor | Ragged:
    """The column `routed_experts` of these rows, from the experts (B, S, layers, experts per token) that their forward recorded."""
    prompts, responses = lengths_of(data.tensors)
    lengths = (prompts + responses).tolist()
    column = route_column([row.numpy() for row in routes], lengths, shape_of(data.tensors, "input_ids")[1])
    return column if is_ragged(data.batch) else column.padded()


def route_column(rows: Sequence[np.ndarray | None], lengths: Sequence[int], width: int) -> Ragged:
    """The column `routed_experts`, in which tokens without known experts are free.

    rows: experts of each row's first tokens. If no row has any, the entries have no size, and take that of the other batches when
          batches are concatenated.
    lengths: tokens of each row. width: of a padded row.
    """
    key = BATCH_KEYS["routed_experts"]
    assert key.dtype is not None
    known = next((row for row in rows if row is not None and len(row)), np.zeros((0, 0, 0), np.int16))
    values = np.full((sum(lengths), *known.shape[1:]), key.fill, known.dtype)
    for row, end, length in zip(rows, np.cumsum(lengths), lengths):
        if row is not None and len(row):
            num = min(length, len(row))
            values[end - length : end - length + num] = row[:num]
    return Ragged(torch.from_numpy(values), torch.tensor(lengths), width, key.fill, key.dtype)


def _entries(name: str, rows: Sequence[Sequence[Any]], width: int) -> Ragged:
    """A column with an entry for each token of the response, and one for an empty response."""
    fill = BATCH_KEYS[name].fill
    return _column(name, [row or [fill] for row in rows], width, fill)


def _column(name: str, rows: Sequence[Sequence[Any]], width: int, fill: float) -> Ragged:
    key = BATCH_KEYS[name]
    assert key.dtype is not None
    return Ragged.of_rows(rows, width, fill, key.dtype, key.stored or key.dtype, left=key.shape == "BP")
