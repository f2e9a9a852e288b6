"""Rollout by transformers' `generate`: slower than the embedded engine, for models that it cannot serve.

    requests ─► batches of max_num_seqs, left-padded ─► model.generate ─► each row cut at its own end

Rows with images and rows without are generated separately: the model gets what its processor made of the images of all rows.

`generate` runs the forward passes and owns the cache, also the state of recurrent models. The embedded engine's sampler runs as a
logits processor: seeds, filters and log-probs mean the same in both engines, and may differ between rows.
"""

import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from itertools import islice
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
from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.engines.rollout.embedded.sampler import SamplingBatch, sample, uniform
from lockstep.engines.rollout.rollout_engine import (
    ModuleEngine,
    check_against_transformers,
    check_request_images,
    evaluation_mode,
    longest_sequence,
    shortage_of,
    stop_tokens,
)
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.experts import EXPERTS_NAME
from lockstep.models.length_switches import ORIGINAL, miniature, switch_lengths
from lockstep.models.model_check import transformers_forward
from lockstep.models.placeholders import placeholder_ids
from lockstep.models.rope import rope_limit
from lockstep.models.vision import PREFIX_TYPES, own_inputs
from lockstep.protocol.generation import Completion, GenerationRequest, StopReason
from lockstep.protocol.images import ImageInputs
from lockstep.utils.metrics import MinOverRanks

logger = logging.getLogger(__name__)


class HFEngine(ModuleEngine):
    info = ROLLOUT_ENGINES.built_in["hf"]

    def __init__(self, config: RolloutConfig, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_model_len = longest_sequence(config)
        self.model: Any = None
        self.max_num_seqs = config.max_num_seqs  # lowered if memory does not suffice
        self._requests: dict[int, GenerationRequest] = {}
        self._model_is_checked = False

    def bind(self, model: nn.Module) -> None:
        self.model = model
        self._model_is_checked = False

    @contextmanager
    def serving(self) -> Iterator[None]:
        with evaluation_mode(self.module):
            try:
                if not self._model_is_checked:
                    self._check_model()
                yield
            finally:
                self._requests.clear()

    def add(self, request_id: int, request: GenerationRequest) -> None:
        check_request_images(request, self.module.config)
        self._requests[request_id] = request

    def step(self) -> dict[int, Completion]:
        """All of the response of up to `max_num_seqs` requests."""
        first = _image_shapes(next(iter(self._requests.values())))
        alike = (item for item in self._requests.items() if _image_shapes(item[1]) == first)
        batch = dict(islice(alike, self.max_num_seqs))
        completions: list[Completion] = []
        shortage = shortage_of(lambda: completions.extend(self._generate_batch(list(batch.values()))))
        if shortage is not None:
            self._lower_batch(list(batch.values()), shortage)
            return {}
        for request_id in batch:
            del self._requests[request_id]
        return dict(zip(batch, completions))

    def _lower_batch(self, batch: Sequence[GenerationRequest], shortage: str) -> None:
        """Generate fewer at once from now on."""
        if len(batch) == 1:
            prompt, new = len(batch[0].prompt_ids), batch[0].sampling.max_tokens
            raise MemoryError(
                f"a single sequence of {prompt} prompt tokens and up to {new} new ones does not fit: {shortage}; lower "
                "data.max_response_length or data.max_prompt_length"
            )
        self.max_num_seqs = len(batch) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning(
            "out of memory for %d sequences at once (%s): the limit is %d from now on; set "
            "actor_rollout_ref.rollout.max_num_seqs=%d",
            *(len(batch), shortage, self.max_num_seqs, self.max_num_seqs),
        )

    def lowered_limits(self) -> dict[str, float]:
        lowered = self.max_num_seqs < self.config.max_num_seqs
        return {"perf/rollout_limit/max_num_seqs": MinOverRanks(self.max_num_seqs)} if lowered else {}

    def unfinished(self) -> list[int]:
        return list(self._requests)

    def abort(self, request_ids: Collection[int]) -> dict[int, Completion]:
        found = [request_id for request_id in request_ids if self._requests.pop(request_id, None) is not None]
        return {request_id: Completion([], [], "abort", []) for request_id in found}

    @property
    def module(self) -> Any:
        if self.model is None:
            raise RuntimeError("the rollout engine has no model yet: call bind(model) first")
        return self.model

    def _check_model(self) -> None:
        path = "transformers' generate with a cache"
        advice = "No rollout engine can serve this model."
        if self.config.max_num_seqs > 1:
            path = "transformers' generate on a left-padded batch"
            advice = "Set actor_rollout_ref.rollout.max_num_seqs=1, which needs no padding."
        block_size = self.config.kv_block_size
        check_against_transformers(self._run, self.module, self.max_model_len, block_size, path=path, advice=advice)
        switches = {key: n for key, n in switch_lengths(self.module.config).items() if n < self.max_model_len}
        if switches:
            self._check_switches(switches)
        self._model_is_checked = True

    def _check_switches(self, switches: dict[str, int]) -> None:
        """Check that decoding goes on across the lengths at which the model changes, on a small model with the same settings."""
        key = min(switches, key=lambda key: switches[key])
        advice = (
            f"It changes at {switches[key]} tokens ({key} in its config.json): keep data.max_prompt_length + "
            f"data.max_response_length (actor_rollout_ref.rollout.max_model_len) at {switches[key]} or less, or set another "
            "actor_rollout_ref.rollout.name."
        )
        engine = HFEngine(replace(self.config, prompt_length=48, response_length=16, max_model_len=None), [], 0)
        try:
            engine.bind(miniature(self.module, engine.max_model_len))
        except Exception as error:  # the model's own code, for a config that nobody has
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"{type(self.module).__name__} cannot be checked as a small model ({problem}). {advice}"
            ) from error
        path = f"transformers' generate beyond {switches[key]} tokens"
        for block_size in (2, 16):  # prompts that end before the switch, and such that end after it
            length = engine.max_model_len
            check_against_transformers(engine._run, engine.module, length, block_size, path=path, advice=advice)

    def _generate_batch(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        model = self.module
        device = model.get_input_embeddings().weight.device
        width = max(len(r.prompt_ids) for r in requests)
        padding = [width - len(r.prompt_ids) for r in requests]
        ids = torch.tensor([[self.pad_token_id] * n + r.prompt_ids for n, r in zip(padding, requests)], device=device)
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=device)
        excluded = torch.tensor(placeholder_ids(model.config), dtype=torch.long, device=device)
        stop_ids = [stop_tokens(r.sampling, self.eos_token_ids) for r in requests]
        sampler = TokenSampler(requests, stop_ids, device, excluded if len(excluded) else None)
        images = [r.images for r in requests if r.images is not None]
        inputs = own_inputs(model, ids, reduce(ImageInputs.then, images)) if images else {}
        with _generation_mode(model), torch.no_grad():
            model.generate(
                ids,
                attention_mask=mask,
                **inputs,
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=max(r.sampling.max_tokens for r in requests),
                    pad_token_id=self.pad_token_id,
                ),
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([RowsDone(sampler)]),
            )
        return sampler.completions(self.policy_version)


def _image_shapes(request: GenerationRequest) -> tuple[Any, ...] | None:
    """Rows whose images have tensors of the same shape beyond the first dimension can be generated together."""
    images = request.images
    return None if images is None else tuple((name, *value.shape[1:]) for name, value in images.tensors.items())


class TokenSampler(LogitsProcessor):
    """Samples each row's token by its own request and masks all others; records tokens and log-probs.

    excluded: tokens that are never sampled.
    done: (N,) rows that have met a stop token or their `max_tokens`.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        stop_ids: Sequence[frozenset[int]],
        device: torch.device,
        excluded: Tensor | None,
    ) -> None:
        self.requests = requests
        self.stop_ids = stop_ids
        self.done = torch.zeros(len(requests), dtype=torch.bool, device=device)
        width = max(1, *(len(s) for s in stop_ids))
        self._stops = torch.tensor([[*s, *[-1] * (width - len(s))] for s in stop_ids], device=device)
        self._max_tokens = torch.tensor([r.sampling.max_tokens for r in requests], device=device)
        self._batch = SamplingBatch([r.sampling for r in requests], device, excluded)
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        positions = [len(r.prompt_ids) + len(self._tokens) for r in self.requests]
        random_N = uniform([r.seed for r in self.requests], positions).to(scores.device)
        tokens, log_probs = sample(scores, self._batch, random_N)
        self._tokens.append(tokens)
        self._log_probs.append(log_probs)
        self.done |= (tokens[:, None] == self._stops).any(-1) | (len(self._tokens) >= self._max_tokens)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def completions(self, policy_version: int) -> list[Completion]:
        tokens = torch.stack(self._tokens, 1).tolist()
        log_probs = torch.stack(self._log_probs, 1).tolist()
        result = []
        for i, request in enumerate(self.requests):
            length = request.sampling.max_tokens
            stops = (n for n, token in enumerate(tokens[i][:length], 1) if token in self.stop_ids[i])
            end = next(stops, None)
            reason: StopReason = "length" if end is None else "stop"
            cut = slice(end or length)
            chosen = tokens[i][cut]
            result.append(Completion(chosen, log_probs[i][cut], reason, [policy_version] * len(chosen)))
        return result


class RowsDone(StoppingCriteria):
    def __init__(self, sampler: TokenSampler) -> None:
        self.sampler = sampler

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return self.sampler.done


@contextmanager
def _generation_mode(model: Any) -> Iterator[None]:
    """transformers' own layers and attention, and no generation defaults of the model; restored afterwards.

    Phi models would drop the cache at `original_max_position_embeddings`, although their frequencies are fixed (models/rope.py).
    """
    text = model.config.get_text_config()
    defaults = model.generation_config
    original = getattr(model.config, ORIGINAL, None) if rope_limit(model) is not None else None
    attention = text._attn_implementation
    if attention == ATTENTION_NAME:
        # sdpa ignores soft-capping, and lets text alone see later tokens in models of a prefix
        is_plain = getattr(text, "attn_logit_softcapping", None) is None and model.config.model_type not in PREFIX_TYPES
        use_sdpa = model._supports_sdpa and is_plain
        attention = "sdpa" if use_sdpa else "eager"
    model.generation_config = GenerationConfig()
    if original is not None:
        setattr(model.config, ORIGINAL, sys.maxsize)
    try:
        with transformers_forward(model, attention, EXPERTS_NAME):
            yield
    finally:
        model.generation_config = defaults
        if original is not None:
            setattr(model.config, ORIGINAL, original)
