"""A rollout engine of your own: one request after another, and the whole sequence through the model for every token.

    lockstep ppo actor_rollout_ref.rollout.name=examples/plugins/rollout_engine.py:PlainRollout ...

`info` says what the engine can do, for checks, notices and `lockstep plan` (`lockstep/config/engines.py`);
`lockstep/engines/rollout/rollout_engine.py` says what each method must do.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engines import RolloutEngineInfo
from lockstep.engines.rollout import Completion, GenerationRequest
from lockstep.engines.rollout.embedded.sampler import SamplingBatch, sample, uniform
from lockstep.engines.rollout.rollout_engine import ModuleEngine, evaluation_mode, longest_sequence, stop_tokens
from lockstep.models.model_check import transformers_forward


class PlainRollout(ModuleEngine):
    info = RolloutEngineInfo(
        shares_weights=True,
        takes_adapters=True,
        unread=("max_num_seqs", "gpu_memory_utilization", "kv_block_size", "server."),
    )

    def __init__(self, config: RolloutConfig, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.max_model_len = longest_sequence(config)
        self._requests: dict[int, GenerationRequest] = {}

    def bind(self, model: nn.Module) -> None:
        self._module = model

    @property
    def module(self) -> Any:
        return self._module

    def add(self, request_id: int, request: GenerationRequest) -> None:
        self._requests[request_id] = request

    def step(self) -> dict[int, Completion]:
        request_id = next(iter(self._requests))
        return {request_id: self._complete(self._requests.pop(request_id))}

    def unfinished(self) -> list[int]:
        return list(self._requests)

    def abort(self, request_ids: Collection[int]) -> dict[int, Completion]:
        found = [request_id for request_id in request_ids if self._requests.pop(request_id, None) is not None]
        return {request_id: Completion([], [], "abort", []) for request_id in found}

    @torch.no_grad()
    def _complete(self, request: GenerationRequest) -> Completion:
        device = next(self.module.parameters()).device
        stops = stop_tokens(request.sampling, self.eos_token_ids)
        sampling = SamplingBatch([request.sampling], device)
        tokens: list[int] = []
        log_probs: list[float] = []
        with evaluation_mode(self.module), transformers_forward(self.module):
            while len(tokens) < request.sampling.max_tokens and not stops & set(tokens):
                ids = request.prompt_ids + tokens
                logits = self.module(torch.tensor([ids], device=device), use_cache=False).logits[:, -1]
                token, log_prob = sample(logits, sampling, uniform([request.seed], [len(ids)]).to(device))
                tokens.append(int(token))
                log_probs.append(float(log_prob))
        reason = "stop" if tokens[-1] in stops else "length"
        return Completion(tokens, log_probs, reason, [self.policy_version] * len(tokens))
