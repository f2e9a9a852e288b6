"""verl.trainer.config: dataclasses of the `algorithm` section, and the presets of rollout correction.

The config `ppo_trainer` itself is not a file here; see `lockstep.verl._config`.
"""

from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.config import algorithm
from lockstep.verl.base_config import BaseConfig as BaseConfig, DictLike, adapt_sections, assignable
from lockstep.verl.workers.config.model import CheckpointConfig as CheckpointConfig

Threshold = float | str | None


@assignable()
@dataclass(frozen=True)
class FilterGroupsConfig(DictLike, algorithm.FilterGroupsConfig): ...


@assignable()
@dataclass(frozen=True)
class KLControlConfig(DictLike, algorithm.KLControlConfig): ...


@assignable()
@dataclass(frozen=True)
class RolloutCorrectionConfig(DictLike, algorithm.RolloutCorrectionConfig):
    """`algorithm.rollout_correction`, with verl's presets as constructors.

    decoupled_*  importance weights and rejection before the update
    bypass_*     the rollout's log-probs are the old ones; PPO's clipped loss, or REINFORCE (pg)
    *_is, *_tis  importance weights per sequence or token, truncated at `is_threshold`
    *_geo_rs     rejects sequences by the geometric mean of their ratios, *_k3_rs by their k3 estimate of the KL
    """

    @classmethod
    def _weights(cls, level: str | None, is_threshold: float, **others: Any) -> Self:
        return cls(rollout_is=level, rollout_is_threshold=is_threshold, **others)  # type: ignore[arg-type]

    @classmethod
    def disabled(cls) -> Self:
        return cls()

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> Self:
        return cls._weights("token", threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> Self:
        return cls._weights("sequence", threshold)

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold: float = 2.0, rs_threshold: Threshold = "0.5_2.0") -> Self:
        return cls._weights("sequence", is_threshold, rollout_rs="seq_sum_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: Threshold = "0.999_1.001") -> Self:
        return cls(rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: Threshold = "0.999_1.001") -> Self:
        return cls._weights("sequence", is_threshold, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: Threshold = "0.999_1.001") -> Self:
        return cls._weights("token", is_threshold, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = 0.01) -> Self:
        return cls(rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01) -> Self:
        return cls._weights("sequence", is_threshold, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01) -> Self:
        return cls._weights("token", is_threshold, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_ppo_clip(cls) -> Self:
        return cls(bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Threshold = "0.999_1.001") -> Self:
        return cls(rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = 0.01) -> Self:
        return cls(rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold, bypass_mode=True)

    @classmethod
    def bypass_pg_is(cls, threshold: float = 2.0) -> Self:
        return cls._weights("sequence", threshold, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Threshold = "0.999_1.001") -> Self:
        rejection = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": rs_threshold}
        return cls._weights(None, 2.0, bypass_mode=True, loss_type="reinforce", **rejection)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: Threshold = "0.999_1.001") -> Self:
        rejection = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": rs_threshold}
        return cls._weights("sequence", is_threshold, bypass_mode=True, loss_type="reinforce", **rejection)

    @classmethod
    def bypass_pg_geo_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: Threshold = "0.999_1.001") -> Self:
        rejection = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": rs_threshold}
        return cls._weights("token", is_threshold, bypass_mode=True, loss_type="reinforce", **rejection)


@assignable()
@dataclass(frozen=True)
class AlgoConfig(DictLike, algorithm.AlgoConfig):
    """The `algorithm` section, also for a program that constructs it itself."""

    rollout_correction: algorithm.RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def __post_init__(self) -> None:
        adapt_sections(self)
