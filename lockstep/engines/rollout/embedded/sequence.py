"""One request on its way through the engine."""

from dataclasses import dataclass, field

from lockstep.engines.rollout.base import Completion, GenerationRequest, StopReason


@dataclass(eq=False)
class Sequence:
    """A prompt and what was generated for it so far.

    There are no phases: `num_computed` of `len(tokens)` tokens have their keys and values in the cache, and a step computes
    more of them; when all are computed, the next token can be drawn. Where the device runs ahead of the host, up to `num_ahead`
    more tokens have been drawn and partly computed, which the host has not read yet.

    index:     place in the order of arrival.
    prompt_id: equal for sequences with equal prompts, -1 where prompts are not shared.
    blocks:    cache blocks of the tokens, in order.
    """

    index: int
    request: GenerationRequest
    stop_ids: frozenset[int]
    policy_version: int
    prompt_id: int = -1
    tokens: list[int] = field(init=False)
    num_computed: int = 0
    num_ahead: int = 0
    blocks: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None
    num_preempted: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.log_probs)

    @property
    def longest(self) -> int:
        """Tokens that must fit the cache: all but the last one drawn, which is never computed."""
        return self.num_prompt + self.request.sampling.max_tokens - 1

    @property
    def num_undrawn(self) -> int:
        """Tokens that it may still draw, if no stop token comes before."""
        return self.request.sampling.max_tokens - self.num_generated - self.num_ahead

    @property
    def decodes(self) -> bool:
        """Whether all that is left to compute is the token drawn last."""
        drawn = self.num_generated + self.num_ahead
        return drawn > 0 and len(self.tokens) + self.num_ahead - self.num_computed <= 1

    def extend(self, tokens: list[int], log_probs: list[float]) -> None:
        """Append tokens that the device drew; none but the last of them can be a stop token."""
        self.tokens += tokens
        self.log_probs += log_probs
        if tokens and tokens[-1] in self.stop_ids:
            self.stop_reason = "stop"
        elif self.num_generated == self.request.sampling.max_tokens:
            self.stop_reason = "length"

    def completion(self) -> Completion:
        assert self.stop_reason is not None
        return Completion(
            token_ids=self.tokens[self.num_prompt :],
            log_probs=self.log_probs,
            stop_reason=self.stop_reason,
            policy_version=self.policy_version,
            num_preempted=self.num_preempted,
        )
