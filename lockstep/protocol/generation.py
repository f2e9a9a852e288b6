"""What a rollout is asked for and what it answers: sampling parameters, requests and completions."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lockstep.protocol.images import ImageInputs
from lockstep.utils.sampling_limits import MAX_TEMPERATURE, MAX_TOP_K, MIN_TEMPERATURE, MIN_TOP_P

StopReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are sampled.

    temperature:    divides the logits; 0 takes the likeliest token, and so does every one below `MIN_TEMPERATURE`.
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
        """Values that 32 bits cannot hold are replaced by limits of the same effect, so that no sampler meets them."""
        if not self.temperature >= 0:  # also NaN
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or more")
        if self.temperature > MAX_TEMPERATURE:
            raise ValueError(f"temperature={self.temperature}: must be at most {MAX_TEMPERATURE:g}")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}: must be -1 or 0 (all tokens) or at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: must lie in [0, 1]")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "top_p", max(self.top_p, MIN_TOP_P))
        object.__setattr__(self, "top_k", min(self.top_k, MAX_TOP_K))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether min-p, top-k or top-p removes part of the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class GenerationRequest:
    """One response to one prompt. A sampled token depends only on its logits, `seed` and its position in the sequence.

    images: those whose placeholders are in `prompt_ids`.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int = 0
    images: ImageInputs | None = None

    @property
    def stream_seed(self) -> int:
        """For engines whose random stream starts with each request: the rest of a response must not repeat that of its start."""
        return (self.seed + len(self.prompt_ids) * 0x9E37_79B9_7F4A_7C15) % 2**63

    def after(self, token_ids: list[int]) -> "GenerationRequest":
        """The request for the rest of the response, whose first tokens are `token_ids`."""
        sampling = replace(self.sampling, max_tokens=self.sampling.max_tokens - len(token_ids))
        return replace(self, prompt_ids=self.prompt_ids + token_ids, sampling=sampling)


@dataclass(frozen=True)
class Completion:
    """One response.

    token_ids:       the sampled tokens, including the stop token if one ended the response.
    log_probs:       of each token, under the full distribution at the request's temperature (1 if greedy).
    stop_reason:     "stop" at a stop token, "length" at `max_tokens`, "abort" if the request was ended early.
    policy_versions: of each token: number of updates of the weights that sampled it.
    num_preempted:   how often the sequence lost its cache and was prefilled again.
    routes:          (tokens, layers, experts per token) the experts that computed prompt and response, from the first token on. The
                     last sampled token was never computed and has none. None if the engine does not record them.
    """

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: StopReason
    policy_versions: list[int]
    num_preempted: int = 0
    routes: np.ndarray | None = None

    @property
    def policy_version(self) -> int:
        """That of the first token: the oldest weights."""
        return self.policy_versions[0]

    def then(self, rest: "Completion") -> "Completion":
        """This response, which was ended early, with its rest."""
        return Completion(
            self.token_ids + rest.token_ids,
            self.log_probs + rest.log_probs,
            rest.stop_reason,
            self.policy_versions + rest.policy_versions,
            self.num_preempted + rest.num_preempted,
            first_routes(self.routes, rest.routes),
        )


def first_routes(earlier: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """The routes of a sequence that was computed twice: those of the first time, which its log-probs were computed with.

    Both begin with the first token; the later ones add tokens that the earlier ones lack.
    """
    if earlier is None or later is None:
        return later if earlier is None else earlier
    return np.concatenate([earlier, later[len(earlier) :]])


class WeightsLostError(ConnectionError):
    """The rollout generates again, but no longer with the policy's weights; sending them again lets it go on."""


Outcome = Completion | Exception
"""What became of a request: its response, or why it alone has none. An engine that fails for all requests raises instead."""
