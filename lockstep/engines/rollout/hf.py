"""Rollout by transformers' own `generate`: slower than embedded, for models that embedded cannot serve.

    requests ─► batches of max_num_seqs, padded left ─► model.generate ─► cut at each request's own end

`generate` drives the forward passes and its cache; tokens are drawn by the embedded engine's sampler, put in as a
logits processor. So seeds, filters and log-probs mean the same in both engines, and rows of a batch may differ in them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.engines.rollout.base import (
    ROLLOUT_ENGINES,
    Completion,
    GenerationRequest,
    RolloutEngine,
    check_requests,
    copy_weights,
    longest_sequence,
    stop_tokens,
)
from lockstep.engines.rollout.embedded.sampler import SamplingBatch, sample
from lockstep.models.attention import ATTENTION_NAME


@ROLLOUT_ENGINES.register("hf")
class HFEngine(RolloutEngine):
    def __init__(self, config: RolloutConfig, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_model_len = longest_sequence(config)
        self.model: Any = None

    def bind(self, model: nn.Module) -> None:
        self.model = model

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        copy_weights(self._bound, weights)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        check_requests(requests, self.max_model_len)
        completions: list[Completion] = []
        size = self.config.max_num_seqs
        for first in range(0, len(requests), size):
            completions += self._generate_batch(requests[first : first + size])
        return completions

    @property
    def _bound(self) -> Any:
        if self.model is None:
            raise RuntimeError("the rollout engine has no model yet: call bind(model) first")
        return self.model

    def _generate_batch(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        model = self._bound
        device = model.get_input_embeddings().weight.device
        width = max(len(r.prompt_ids) for r in requests)
        padding = [width - len(r.prompt_ids) for r in requests]
        ids = torch.tensor([[self.pad_token_id] * n + r.prompt_ids for n, r in zip(padding, requests)], device=device)
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=device)
        draw = DrawTokens(requests, [stop_tokens(r.sampling, self.eos_token_ids) for r in requests], device)
        with _plain_generate(model), torch.no_grad():
            model.generate(
                ids,
                attention_mask=mask,
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=max(r.sampling.max_tokens for r in requests),
                    pad_token_id=self.pad_token_id,
                ),
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([AllDrawn(draw)]),
            )
        return draw.completions(self.policy_version)


class DrawTokens(LogitsProcessor):
    """Draws each row's token by its own request and leaves it as the only one possible; keeps what it drew."""

    def __init__(
        self, requests: Sequence[GenerationRequest], stop_ids: Sequence[frozenset[int]], device: torch.device
    ) -> None:
        self.requests = requests
        self.stop_ids = stop_ids
        width = max(1, *(len(s) for s in stop_ids))
        self._stops = torch.tensor([[*s, *[-1] * (width - len(s))] for s in stop_ids], device=device)
        self._max_tokens = torch.tensor([r.sampling.max_tokens for r in requests], device=device)
        self.done = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = len(self._tokens)
        batch = SamplingBatch.build(
            [r.sampling for r in self.requests],
            [r.seed for r in self.requests],
            [len(r.prompt_ids) + drawn for r in self.requests],
            scores.device,
        )
        tokens, log_probs = sample(scores, batch)
        self._tokens.append(tokens)
        self._log_probs.append(log_probs)
        self.done |= (tokens[:, None] == self._stops).any(-1) | (drawn + 1 >= self._max_tokens)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def completions(self, policy_version: int) -> list[Completion]:
        tokens = torch.stack(self._tokens, 1).tolist()
        log_probs = torch.stack(self._log_probs, 1).tolist()
        result = []
        for i, request in enumerate(self.requests):
            ends = (n for n, token in enumerate(tokens[i], 1) if token in self.stop_ids[i])
            end = next(ends, None)
            if end is None or end > request.sampling.max_tokens:
                length = request.sampling.max_tokens
                result.append(Completion(tokens[i][:length], log_probs[i][:length], "length", policy_version))
            else:
                result.append(Completion(tokens[i][:end], log_probs[i][:end], "stop", policy_version))
        return result


class AllDrawn(StoppingCriteria):
    """A row is done at its stop token or its own `max_tokens`."""

    def __init__(self, draw: DrawTokens) -> None:
        self.draw = draw

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return self.draw.done


@contextmanager
def _plain_generate(model: Any) -> Iterator[None]:
    """The model as `generate` wants it: evaluation mode, transformers' own attention, no generation defaults."""
    training = [m for m in model.modules() if m.training]
    attention, defaults = model.config._attn_implementation, model.generation_config
    model.eval()
    if attention == ATTENTION_NAME:
        model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = defaults
        if attention == ATTENTION_NAME:
            model.set_attn_implementation(ATTENTION_NAME)
        for module in training:
            module.training = True
