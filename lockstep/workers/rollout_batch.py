"""Conversion between batch and rollout engine: prompts to requests, completions to batch tensors.

raw_prompt_ids, sampling_seed ──► GenerationRequest … Completion ──► prompts, responses, input_ids, attention_mask,
                                                                     position_ids, response_mask, policy_versions,
                                                                     rollout_log_probs
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.agents.trajectory import NOT_SAMPLED, Trajectory
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams


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
    return [GenerationRequest(prompt_ids=list(p), sampling=sampling, seed=s) for p, s in zip(ids, seeds)]


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


def trajectory_tensors(rows: Sequence[Trajectory], config: RolloutConfig, pad_token_id: int) -> dict[str, Tensor]:
    """Prompts padded on the left to `rollout.prompt_length`, responses on the right to `rollout.response_length`."""
    length = config.response_length
    prompts, prompt_mask = _pad([row.prompt_ids for row in rows], config.prompt_length, pad_token_id, left=True)
    responses, is_token = _pad([row.response_ids for row in rows], length, pad_token_id)
    attention_mask = torch.cat([prompt_mask, is_token], 1)
    tensors: dict[str, Tensor] = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp_min(0),
        "response_mask": _pad([row.response_mask for row in rows], length, 0)[0],
        "policy_version": torch.tensor([row.policy_version for row in rows], dtype=torch.int64),
        "policy_versions": _pad([row.policy_versions for row in rows], length, NOT_SAMPLED)[0],
    }
    if config.calculate_log_probs:
        tensors["rollout_log_probs"] = _pad([row.log_probs for row in rows], length, 0.0)[0]
    return tensors


def _pad(rows: Sequence[Sequence[Any]], width: int, fill: float, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """(B, width) values and their 0/1 mask."""
    lengths, place = np.array([len(row) for row in rows])[:, None], np.arange(width)[None, :]
    mask = place >= width - lengths if left else place < lengths
    values = np.full(mask.shape, fill, dtype=np.float32 if isinstance(fill, float) else np.int64)
    values[mask] = np.fromiter(chain.from_iterable(rows), values.dtype)
    return torch.from_numpy(values), torch.from_numpy(mask.astype(np.int64))
