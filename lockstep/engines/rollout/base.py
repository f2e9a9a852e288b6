"""What every rollout engine takes and gives back: requests, completions, the interface and the table of engines."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.registry import Registry

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    temperature:    divides the logits; 0 takes the likeliest token.
    top_k:          draw from the k likeliest tokens; -1 or 0 for all.
    top_p:          draw from the smallest set of likeliest tokens whose probability reaches p.
    min_p:          draw from the tokens with at least this share of the likeliest one's probability.
    max_tokens:     most tokens to generate, the stop token included.
    stop_token_ids: tokens that end the response beside the model's end-of-sequence tokens.
    ignore_eos:     go on to `max_tokens` past every stop token.
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
        """Whether part of the distribution is cut off before the draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class GenerationRequest:
    """One response to one prompt. The draws depend on `seed` and the position in the sequence alone."""

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """One response.

    token_ids:      the tokens drawn; the stop token, if one ended the response, is the last of them.
    log_probs:      of each token, under the full distribution at the request's temperature (1 where it is greedy).
    stop_reason:    "stop" at a stop token, "length" at `max_tokens`.
    policy_version: of the weights at the time when the request came in.
    num_preempted:  how often the sequence lost its cache and was computed anew.
    """

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: StopReason
    policy_version: int
    num_preempted: int = 0


class RolloutEngine(ABC):
    """Turns requests into completions with the weights of the model bound to it.

    policy_version: of those weights; whoever updates them sets it.
    """

    policy_version: int = 0

    @abstractmethod
    def bind(self, model: nn.Module) -> None:
        """Decode with this module's parameters, as they are at each later call."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """The completions of `requests`, in their order."""

    async def generate_one(self, request: GenerationRequest) -> Completion:
        """One completion for a caller that waits beside others; an engine may batch what runs at the same time."""
        return (await asyncio.to_thread(self.generate, [request]))[0]

    @abstractmethod
    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take new values of named parameters; needed only where the weights are not the trainer's own tensors."""

    def sleep(self) -> None:  # noqa: B027
        """Give the memory of caches back until `wake` or the next request."""

    def wake(self) -> None:  # noqa: B027
        """Undo `sleep`; the next request does it too."""


ROLLOUT_ENGINES: Registry[type[RolloutEngine]] = Registry("rollout engine", key="actor_rollout_ref.rollout.name")


def create_rollout_engine(config: RolloutConfig, eos_token_ids: Sequence[int], pad_token_id: int) -> RolloutEngine:
    """The engine that `config.name` names. It generates after `bind`."""
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
                f"request {i}: {prompt} prompt tokens + max_tokens {new} = {prompt + new} exceed the longest sequence "
                f"{max_model_len}; raise actor_rollout_ref.rollout.max_model_len or shorten the prompt or max_tokens"
            )


def longest_sequence(config: RolloutConfig) -> int:
    if config.max_model_len is not None:
        return config.max_model_len
    return config.prompt_length + config.response_length


def copy_weights(model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Copy values into the parameters and buffers of `model` by name."""
    state = model.state_dict()
    with torch.no_grad():
        for name, value in weights:
            if name not in state:
                raise ValueError(f"update_weights: the rollout's model has no parameter {name!r}")
            if state[name].shape != value.shape:
                raise ValueError(
                    f"update_weights: {name} has shape {tuple(value.shape)}, "
                    f"in the rollout's model {tuple(state[name].shape)}"
                )
            state[name].copy_(value)
