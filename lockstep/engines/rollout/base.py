"""The interface of rollout engines: requests, completions, base class and registry; and what all engines share."""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, RolloutConfig
from lockstep.config.model import HFModelConfig
from lockstep.models.loading import load_causal_lm, resolve_dtype
from lockstep.models.lora import install_adapters
from lockstep.models.model_check import check_log_probs, reference_log_probs
from lockstep.models.packed_weights import pack_weights
from lockstep.models.token_models import PolicyModel
from lockstep.registry import Registry
from lockstep.utils.fingerprint import fingerprint

StopReason = Literal["stop", "length"]
OWN_DTYPE = ("vllm",)
"""Engines that compute in `rollout.dtype`; the others do so in the actor's type."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are sampled.

    temperature:    divides the logits; 0 takes the likeliest token.
    top_k:          sample from the k likeliest tokens; -1 or 0 for all.
    top_p:          sample from the smallest set of likeliest tokens whose probability reaches p.
    min_p:          sample from the tokens with at least this share of the likeliest token's probability.
    max_tokens:     most tokens to generate, including the stop token.
    stop_token_ids: tokens that end the response, in addition to the model's end-of-sequence tokens.
    ignore_eos:     generate `max_tokens` tokens, ignoring stop tokens.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or more")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}: must be -1 or 0 (all tokens) or at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: must lie in [0, 1]")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether min-p, top-k or top-p removes part of the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class GenerationRequest:
    """One response to one prompt. A sampled token depends only on its logits, `seed` and its position in the sequence."""

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """One response.

    token_ids:      the sampled tokens, including the stop token if one ended the response.
    log_probs:      of each token, under the full distribution at the request's temperature (1 if greedy).
    stop_reason:    "stop" at a stop token, "length" at `max_tokens`.
    policy_version: of the weights when the request arrived.
    num_preempted:  how often the sequence lost its cache and was prefilled again.
    """

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: StopReason
    policy_version: int
    num_preempted: int = 0


class RolloutEngine(ABC):
    """Generates completions, with the tensors of a bound module or with its own copy of the weights.

    shares_weights: whether it decodes with the trainer's tensors (`bind`). Otherwise it holds a copy (`load`), which every
                    update replaces: `begin_update`, `update_weights` with one bucket after another, `finish_update`.
    takes_adapters: whether updates are the trained parameters alone, such as LoRA adapters beside the base that was loaded;
                    otherwise all weights, with adapters merged.
    policy_version: of the weights.
    """

    config: RolloutConfig
    shares_weights: bool = False
    takes_adapters: bool = False
    policy_version: int = 0

    def bind(self, model: nn.Module) -> None:
        """Use this module's parameters, with the values they have at each later call."""
        raise TypeError(f"rollout.name={self.config.name} holds its own copy of the weights: call load")

    @abstractmethod
    def load(self, model: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device) -> None:
        """Load an own copy of the model. key: its config section, for messages."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """The completions of `requests`, in their order."""

    async def generate_one(self, request: GenerationRequest) -> Completion:
        """One completion; an engine may batch concurrent calls."""
        return (await asyncio.to_thread(self.generate, [request]))[0]

    def begin_update(self) -> None:  # noqa: B027
        """Prepare for new weights."""

    @abstractmethod
    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load some of the parameters, by Hugging Face name; tied ones come once."""

    def finish_update(self, version: int) -> None:
        """All parameters have come; they are those of `version`. Nothing computed with earlier ones may be used again."""
        self.policy_version = version

    @abstractmethod
    def fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        """Checksums of the bits of these parameters, as they compute or, if that is unknown, as they were received last.

        A parameter that the engine lacks is left out.
        """

    def drop_cached_prefixes(self) -> None:  # noqa: B027
        """Forget the KV cache of earlier prompts."""

    def sleep(self) -> None:  # noqa: B027
        """Free the KV cache until `wake` or the next request."""

    def wake(self) -> None:  # noqa: B027
        """Undo `sleep`; the next request does so too."""


class ModuleEngine(RolloutEngine):
    """An engine that runs a transformers module in this process."""

    shares_weights = True
    takes_adapters = True

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module given to `bind`."""

    def load(self, model: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device) -> None:
        policy = load_causal_lm(model, key, dtype, device, longest_sequence(self.config))
        install_adapters(PolicyModel(policy), model, key, dtype=dtype, device=device, seed=self.config.seed)
        pack_weights(policy)
        self.bind(policy)
        self.shares_weights = False

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        copy_weights(self.module, weights)

    def fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        state = self.module.state_dict()
        return {name: fingerprint(state[name]) for name in names if name in state}


ROLLOUT_ENGINES: Registry[type[RolloutEngine]] = Registry("rollout engine", key="actor_rollout_ref.rollout.name")


def create_rollout_engine(config: RolloutConfig, eos_token_ids: Sequence[int], pad_token_id: int) -> RolloutEngine:
    """The engine named `config.name`; call `bind` or `load` before generating."""
    engine_class = ROLLOUT_ENGINES.get(config.name)
    return engine_class(config, eos_token_ids, pad_token_id)  # type: ignore[call-arg]


def stop_tokens(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    return frozenset() if sampling.ignore_eos else frozenset(eos_token_ids) | frozenset(sampling.stop_token_ids)


def check_requests(requests: Sequence[GenerationRequest], max_model_len: int) -> None:
    for i, request in enumerate(requests):
        prompt, new = len(request.prompt_ids), request.sampling.max_tokens
        if prompt == 0:
            raise ValueError(f"request {i}: the prompt has no tokens")
        if prompt + new > max_model_len:
            raise ValueError(
                f"request {i}: {prompt} prompt tokens + max_tokens {new} = {prompt + new} exceed max_model_len="
                f"{max_model_len}; raise actor_rollout_ref.rollout.max_model_len or shorten the prompt or max_tokens"
            )


def longest_sequence(config: RolloutConfig) -> int:
    if config.max_model_len is not None:
        return config.max_model_len
    return config.prompt_length + config.response_length


def rollout_dtype(config: ActorRolloutRefConfig, device: torch.device) -> torch.dtype:
    """The type in which the rollout holds its weights: the actor's, or `rollout.dtype` of an engine that reads it."""
    own = config.rollout.dtype if config.rollout.name in OWN_DTYPE else "auto"
    return resolve_dtype(own if own != "auto" else config.actor.fsdp_config.dtype, device)


def copy_weights(model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Copy values into the parameters and buffers of `model` by name."""
    state = model.state_dict()
    with torch.no_grad():
        for name, value in weights:
            if name not in state:
                raise ValueError(f"update_weights: the rollout model has no parameter {name!r}")
            if state[name].shape != value.shape:
                raise ValueError(
                    f"update_weights: {name} has shape {tuple(value.shape)}, "
                    f"but {tuple(state[name].shape)} in the rollout model"
                )
            state[name].copy_(value)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradient checkpointing inside; each module gets its own mode back afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_against_transformers(
    generate: Callable[[Sequence[GenerationRequest]], list[Completion]],
    model: PreTrainedModel,
    max_length: int,
    block_size: int,
    *,
    path: str,
    advice: str,
) -> None:
    """Compare the log-probs of an engine with transformers' eager forward; ValueError if they differ.

    Three random prompts end within the first, second and third cache block, as far as `max_length` allows. The model must be
    in evaluation mode.
    path, advice: for the message, see `check_log_probs`.
    """
    rng, vocab_size = random.Random(0), model.config.get_text_config().vocab_size
    num_new = min(4, max_length - 1)
    lengths = [min(length, max_length - num_new) for length in (3, block_size + 2, 2 * block_size + 1)]
    sampling = SamplingParams(max_tokens=num_new, ignore_eos=True)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    completions = generate([GenerationRequest(prompt, sampling, seed) for seed, prompt in enumerate(prompts)])
    expected = reference_log_probs(model, [prompt + c.token_ids for prompt, c in zip(prompts, completions)])
    got = [torch.tensor(c.log_probs) for c in completions]
    check_log_probs(got, [log_probs[-num_new:].cpu() for log_probs in expected], model=model, path=path, advice=advice)
