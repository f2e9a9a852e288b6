"""The configurations of preference training: reward models (`lockstep rm`) and DPO (`lockstep dpo`)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from lockstep.config.bounds import Bound, NonNegativeFloat, PositiveFloat, PositiveInt
from lockstep.config.sft import (
    SupervisedConfig,
    SupervisedDataConfig,
    SupervisedOptimizerConfig,
    SupervisedTrainerConfig,
)

DPOLoss = Literal["sigmoid", "hinge", "ipo"]


@dataclass(frozen=True)
class PreferenceDataConfig(SupervisedDataConfig):
    """Rows are pairs: a prompt with a chosen and a rejected answer (docs/preference_training.md lists the forms)."""

    prompt_key: str = "prompt"
    """Column of the prompt: text or messages. Not needed if the answers are whole conversations."""
    chosen_key: str = "chosen"
    """Column of the preferred answer: text, an assistant message, or a whole conversation."""
    rejected_key: str = "rejected"
    """Column of the other answer, in the same form."""
    drop_invalid_pairs: bool = False
    """Leave out rows that have an empty answer or two equal ones, with a warning; false reports the first one as an error."""


@dataclass(frozen=True)
class RMDataConfig(PreferenceDataConfig):
    margin_key: str | None = None
    """Column of a number that the score of the chosen answer should exceed the other by; null is no margin."""


@dataclass(frozen=True)
class PreferenceTrainerConfig(SupervisedTrainerConfig):
    total_epochs: PositiveInt = 1
    """Passes over the training rows."""


@dataclass(frozen=True)
class RMLossConfig:
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of (chosen score + rejected score)^2, which keeps the mean score of a pair near 0; 0 turns it off."""


@dataclass(frozen=True)
class RMConfig(SupervisedConfig):
    data: RMDataConfig = field(default_factory=RMDataConfig)
    trainer: PreferenceTrainerConfig = field(default_factory=PreferenceTrainerConfig)
    rm: RMLossConfig = field(default_factory=RMLossConfig)


@dataclass(frozen=True)
class DPOOptimizerConfig(SupervisedOptimizerConfig):
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""


@dataclass(frozen=True)
class DPOLossConfig:
    loss_type: DPOLoss = "sigmoid"
    """sigmoid: the loss of DPO; hinge: of SLiC; ipo: of IPO, on mean log-probs per token."""
    beta: PositiveFloat = 0.1
    """How strongly the policy is kept near the reference; the 1/beta of ipo is twice its target margin."""
    label_smoothing: Annotated[float, Bound(lambda x: 0 <= x < 0.5, "must be at least 0 and below 0.5")] = 0.0
    """sigmoid: the assumed probability that a pair is labelled the wrong way round, below 0.5."""


@dataclass(frozen=True)
class DPOConfig(SupervisedConfig):
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    optim: DPOOptimizerConfig = field(default_factory=DPOOptimizerConfig)
    trainer: PreferenceTrainerConfig = field(default_factory=PreferenceTrainerConfig)
    dpo: DPOLossConfig = field(default_factory=DPOLossConfig)
