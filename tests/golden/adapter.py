"""How the golden cases' configs become ours, and names that several of our functions make up; others are in map.json."""

import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

# so that the harness finds the package of this checkout, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# a tokenizer that is not on disk is a failed case at once, not a wait for the network
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lockstep.config.actor_rollout_ref import ActorConfig, PolicyLossConfig
from lockstep.config.algorithm import AlgoConfig, RolloutCorrectionConfig
from lockstep.models.log_probs import token_log_probs


def actor_config(given: dict[str, Any]) -> ActorConfig:
    """An ActorConfig whose clip distances follow `clip_ratio` where they are not given, as the composed config has them."""
    given = dict(given)
    clip_ratio = given.setdefault("clip_ratio", 0.2)
    given.setdefault("clip_ratio_low", clip_ratio)
    given.setdefault("clip_ratio_high", clip_ratio)
    policy_loss = dict(given.pop("policy_loss", {}))
    correction = RolloutCorrectionConfig(**policy_loss.pop("rollout_correction", {}))
    return ActorConfig(policy_loss=PolicyLossConfig(rollout_correction=correction, **policy_loss), **given)


def algo_config(given: dict[str, Any]) -> AlgoConfig:
    return AlgoConfig(**given)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The models' log-probs with the logits in the place of hidden states."""
    rows = token_log_probs(logits.flatten(0, -2), labels.flatten(), lambda hidden: hidden)["log_probs"]
    return rows.view(labels.shape)


def log_probs_from_logits_response(input_ids: Tensor, logits: Tensor, response_length: int) -> Tensor:
    """Logits at a position are of the token after it."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


override = {
    "torch_functional.logprobs_from_logits": logprobs_from_logits,
    "torch_functional.logprobs_from_logits_v2": logprobs_from_logits,
    "torch_functional.logprobs_from_logits_naive": logprobs_from_logits,
    "torch_functional.log_probs_from_logits_response": log_probs_from_logits_response,
}
