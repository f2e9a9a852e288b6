"""Proof that a rollout holds the trainer's weights, after every update and before a sample is made.

fingerprints   every tensor is counted and checksummed on both sides, by name: the rollout's as it computes with it, if the engine
               can read it back (`RolloutEngine.unread_weights` lists the others)
canary         the rollout continues a fixed text, and the trainer computes the log-probs of what it wrote
"""

import random
from collections.abc import Collection

import torch
from torch import Tensor

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.utils.audit import AuditError

Fingerprints = dict[str, int]
"""Parameter to the checksum of its bits."""

CANARY_METRIC = "weight_sync/canary_gap"
MAX_PROMPT, MAX_NEW = 144, 8
"""Tokens of the canary: the prompt is longer than a block of prefix cache (vLLM on CPU: 128), if data.max_prompt_length allows."""


def canary_prompt(token_ids: Collection[int], config: RolloutConfig) -> list[int]:
    """A fixed text of random words: no model is sure how it goes on, so that the log-probs depend on every weight.

    token_ids: those of ordinary text.
    """
    return random.Random(0).choices(sorted(token_ids), k=min(MAX_PROMPT, config.prompt_length))


def canary_bound(*dtypes: torch.dtype, quantized: bool = False) -> float:
    """The largest difference of log-probs that rounding explains, of engines that compute in these types."""
    # vLLM in bfloat16 against the trainer, random weights: at most 0.02 (0.5B shape, 24 layers) and 0.09 (7B, 28 layers).
    if quantized:
        return 1.0
    return 1e-3 if all(dtype == torch.float32 for dtype in dtypes) else 0.3


def measured_bound(bound: float, gap: float) -> float:
    """The bound of all later gaps after a first one that was within `bound`: rounding is of the same size in every update."""
    return min(bound, max(bound / 10, 10 * gap))


def check_fingerprints(sent: Fingerprints, received: list[Fingerprints], version: int) -> None:
    """AuditError if a rank of the rollout lacks a tensor or holds other bits."""
    for rank, found in enumerate(received):
        wrong = [name for name, value in sent.items() if found.get(name) != value]
        if wrong:
            what = "was not received" if wrong[0] not in found else "differs"
            ranks = sum(other != sent for other in received)
            raise AuditError(
                f"the rollout's weights differ from the actor's after update {version} on {ranks} of {len(received)} ranks: on "
                f"rank {rank}, {wrong[0]} {what} ({len(wrong)} of {len(sent)} tensors); its samples would not come from this policy"
            )


def canary_gap(rollout: Tensor, trainer: Tensor, mask: Tensor) -> float:
    """The largest |log p(rollout) - log p(trainer)| of the canary's tokens."""
    gap = (rollout - trainer).abs().masked_fill(~mask.bool(), 0.0).max()
    return float(gap)
