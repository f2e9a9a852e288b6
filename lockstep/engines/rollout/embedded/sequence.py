"""One request and its state in the engine."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lockstep.engines.rollout.embedded.history import prompt_key
from lockstep.engines.rollout.embedded.prompt_images import PromptImages
from lockstep.protocol.generation import Completion, GenerationRequest, StopReason


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens generated for it so far.

    index:        order of arrival.
    request_id:   the caller's name for it.
    prompt_id:    equal for sequences with equal prompts; -1 if prompts are not shared.
    tokens:       prompt and generated tokens that the host knows.
    max_tokens:   most tokens to generate.
    is_filtered:  whether min-p, top-k or top-p removes part of its distributions.
    num_computed: tokens whose keys and values are in the cache. Once all are computed, the next token can be sampled.
    num_unread:   tokens sampled on the device that the host has not read yet; `num_computed` counts them too.
    blocks:       block table.
    state_slot:   where its state is, from its start until it ends or is preempted; None for a model without states.
    routes:       those of `Completion`, of tokens whose blocks were freed.
    images:       those of the prompt.
    """

    index: int
    request_id: int
    request: GenerationRequest
    stop_ids: frozenset[int]
    policy_version: int
    prompt_id: int = -1
    tokens: list[int] = field(init=False)
    max_tokens: int = field(init=False)
    is_filtered: bool = field(init=False)
    num_computed: int = 0
    num_unread: int = 0
    blocks: list[int] = field(default_factory=list)
    state_slot: int | None = None
    log_probs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None
    num_preempted: int = 0
    routes: np.ndarray | None = None
    images: PromptImages | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.max_tokens = self.request.sampling.max_tokens
        self.is_filtered = self.request.sampling.filtered

    @cached_property
    def prompt_key(self) -> bytes:
        """By which earlier answers to the prompt are known."""
        return prompt_key(self.request)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.log_probs)

    @property
    def rope_delta(self) -> int:
        """Rotary position of a generated token, minus its place in the sequence."""
        return 0 if self.images is None else self.images.rope_delta

    @property
    def max_cached(self) -> int:
        """Most tokens in the cache: all but the last sampled one, which is never computed."""
        return self.num_prompt + self.max_tokens - 1

    @property
    def num_left(self) -> int:
        """Tokens still to sample, if no stop token comes first."""
        return self.max_tokens - len(self.log_probs) - self.num_unread

    @property
    def is_decoding(self) -> bool:
        """Only the last sampled token is left to compute."""
        return len(self.tokens) + self.num_unread - self.num_computed <= 1 and (
            self.num_unread > 0 or bool(self.log_probs)
        )

    def append(self, tokens: list[int], log_probs: list[float]) -> None:
        """Append sampled tokens; only the last of them can be a stop token."""
        self.tokens += tokens
        self.log_probs += log_probs
        if tokens and tokens[-1] in self.stop_ids:
            self.stop_reason = "stop"
        elif self.num_generated == self.max_tokens:
            self.stop_reason = "length"

    def completion(self) -> Completion:
        assert self.stop_reason is not None
        tokens = self.tokens[self.num_prompt :]
        versions = [self.policy_version] * len(tokens)
        return Completion(tokens, self.log_probs, self.stop_reason, versions, self.num_preempted, self.routes)
