"""`trainer.audit.*`: checks that a run does not train wrongly (docs/audits.md)."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["off", "warn", "stop"]
"""What becomes of what an audit finds: nothing, a warning and a metric, or the end of the run."""


@dataclass(frozen=True)
class SupervisedAuditConfig:
    """Audits of every training program. off: not checked; warn: logged, counted in `audit/<name>`; stop: the run ends."""

    finite: Level = "stop"
    """Losses, gradients and what they are computed from are finite numbers."""
    gradient: Level = "warn"
    """The norm of the gradient is neither zero nor far above that of earlier steps."""
    micro_batch_split: Level = "stop"
    """Outputs and loss do not depend on the split into micro-batches."""
    optimizer_steps: Level = "stop"
    """Every update takes as many optimizer steps as its batches promise, and its parameters change."""
    data_order: Level = "stop"
    """Rows come in the order of the sampler, none twice in an epoch and none left out."""
    frozen_parameters: Level = "stop"
    """Parameters that are not trained do not change."""


@dataclass(frozen=True)
class AuditConfig(SupervisedAuditConfig):
    weights: Level = "stop"
    """After every update the rollout computes with the trainer's weights."""
    policy_version: Level = "stop"
    """Every token was sampled by the policy that the step trains, or one within `trainer.max_staleness`."""
    token_round_trip: Level = "warn"
    """The tokens of a conversation are those that its messages render to."""
    rollout_gap: Level = "stop"
    """Log-probs of the rollout are the trainer's: on average, and by position, length and turn."""
    advantages: Level = "warn"
    """Advantages are neither all zero nor all equal."""
    reward_probe: Level = "warn"
    """The reward of a fixed set of responses does not change."""
    reference_policy: Level = "stop"
    """The reference policy does not change."""
