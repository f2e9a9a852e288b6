"""How the golden cases' configs become ours; names that differ are in map.json."""

from typing import Any

from lockstep.config.actor_rollout_ref import ActorConfig, PolicyLossConfig
from lockstep.config.algorithm import AlgoConfig


def actor_config(given: dict[str, Any]) -> ActorConfig:
    """An ActorConfig whose clip distances follow `clip_ratio` where they are not given, as the composed config has them."""
    given = dict(given)
    clip_ratio = given.setdefault("clip_ratio", 0.2)
    given.setdefault("clip_ratio_low", clip_ratio)
    given.setdefault("clip_ratio_high", clip_ratio)
    return ActorConfig(policy_loss=PolicyLossConfig(**given.pop("policy_loss", {})), **given)


def algo_config(given: dict[str, Any]) -> AlgoConfig:
    return AlgoConfig(**given)
