"""Token-exact trajectories: what the policy read and wrote, token by token, in the order of sampling.

prompt ─► sampled tokens ─► context (tool or user messages, template tokens) ─► sampled tokens ─► …

A trajectory only grows, and sampled ids are never rendered again: training sees exactly the tokens of the rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from lockstep.protocol.generation import Completion, first_routes
from lockstep.protocol.images import ImageInputs

NOT_SAMPLED = -1
"""Policy version of a token that the policy did not write."""


@dataclass
class Trajectory:
    """One training sample.

    prompt_ids:      the tokens before the first sampled one.
    response_ids:    everything after them.
    response_mask:   1 = sampled by the policy, 0 = context.
    log_probs:       of sampled tokens at the time of sampling; 0 for context.
    policy_versions: of the weights that sampled each token; NOT_SAMPLED for context.
    routes:          the experts of its tokens from the first on, as in `Completion`; None if none are known.
    images:          those whose placeholders are among its tokens.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    routes: np.ndarray | None = None
    images: ImageInputs | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def policy_version(self) -> int:
        """The policy version of the first sampled token; NOT_SAMPLED if there is none."""
        return next((version for version in self.policy_versions if version != NOT_SAMPLED), NOT_SAMPLED)

    def add_sampled(self, completion: Completion) -> None:
        num_tokens = len(completion.token_ids)
        if not num_tokens == len(completion.log_probs) == len(completion.policy_versions):
            raise ValueError(
                f"a completion of {num_tokens} tokens has {len(completion.log_probs)} log-probs and "
                f"{len(completion.policy_versions)} policy versions"
            )
        self.response_ids += completion.token_ids
        self.response_mask += [1] * num_tokens
        self.log_probs += completion.log_probs
        self.policy_versions += completion.policy_versions
        self.routes = first_routes(self.routes, completion.routes)

    def add_context(self, ids: Sequence[int], images: ImageInputs | None = None) -> None:
        """Append tokens that are no training target. images: those whose placeholders are among them."""
        self.add_images(images)
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.policy_versions += [NOT_SAMPLED] * len(ids)

    def add_images(self, images: ImageInputs | None) -> None:
        """Those that follow in the same sequence."""
        self.images = images if self.images is None else self.images.then(images)

    def to_state(self) -> dict[str, Any]:
        """As plain data."""
        state = {part.name: getattr(self, part.name) for part in fields(self)}
        return state | {"images": None if self.images is None else self.images.to_state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Trajectory":
        images = state.get("images")
        return cls(**state | {"images": None if images is None else ImageInputs(**images)})
