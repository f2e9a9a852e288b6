"""The keys of micro-batches: how many sequences or tokens a forward or backward pass takes at once.

A switch that is null takes sequences if their number is set, otherwise as many tokens as the device's memory has room for
(`plan/token_budgets.py`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

_ARR = "actor_rollout_ref"


class MicroBatchKeys(NamedTuple):
    """switch: fill by tokens. rows, tokens: sequences or tokens of a micro-batch. role: whose ranks compute it."""

    switch: str
    rows: str
    tokens: str
    role: str


RL = {
    "reward model": MicroBatchKeys(
        "reward_model.use_dynamic_bsz",
        "reward_model.micro_batch_size_per_gpu",
        "reward_model.forward_max_token_len_per_gpu",
        "rm",
    ),
    "old log-probs": MicroBatchKeys(
        f"{_ARR}.rollout.log_prob_use_dynamic_bsz",
        f"{_ARR}.rollout.log_prob_micro_batch_size_per_gpu",
        f"{_ARR}.rollout.log_prob_max_token_len_per_gpu",
        "actor",
    ),
    "reference log-probs": MicroBatchKeys(
        f"{_ARR}.ref.log_prob_use_dynamic_bsz",
        f"{_ARR}.ref.log_prob_micro_batch_size_per_gpu",
        f"{_ARR}.ref.log_prob_max_token_len_per_gpu",
        "ref",
    ),
    "values": MicroBatchKeys(
        "critic.use_dynamic_bsz",
        "critic.forward_micro_batch_size_per_gpu",
        "critic.forward_max_token_len_per_gpu",
        "critic",
    ),
    "update critic": MicroBatchKeys(
        "critic.use_dynamic_bsz",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.ppo_max_token_len_per_gpu",
        "critic",
    ),
    "update actor": MicroBatchKeys(
        f"{_ARR}.actor.use_dynamic_bsz",
        f"{_ARR}.actor.ppo_micro_batch_size_per_gpu",
        f"{_ARR}.actor.ppo_max_token_len_per_gpu",
        "actor",
    ),
}
"""Phase of a step (`plan/memory.py`) -> its keys."""
SUPERVISED = {
    phase: MicroBatchKeys(
        "data.use_dynamic_bsz", "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu", "model"
    )
    for phase in ("update", "forward")
}
"""The same for SFT, reward models and DPO. `forward` is validation, and DPO's reference log-probs."""

_FOLLOWERS = {
    "old log-probs": ("update actor", True),
    "reference log-probs": ("update actor", True),
    "update critic": ("update actor", False),
    "reward model": ("update critic", True),
}
"""Phase -> the one whose switch it follows, and whether its number of tokens does too."""


def filled_by_tokens(values: Mapping[str, Any]) -> dict[str, bool | None]:
    """Values of the switches if tokens are set, but neither the switch nor sequences. values: the keys that the user has set."""

    def is_set(key: str) -> bool:
        return values.get(key) is not None

    switches: dict[str, bool | None] = {
        keys.switch: True
        for keys in (*RL.values(), SUPERVISED["update"])
        if is_set(keys.tokens) and keys.switch not in values and not is_set(keys.rows)
    }
    for phase, (source, has_its_tokens) in _FOLLOWERS.items():
        keys, followed = RL[phase], RL[source].switch
        if followed in switches and keys.switch not in values and keys.switch not in switches:
            switches[keys.switch] = switches[followed] if has_its_tokens and not is_set(keys.rows) else None
    return switches


def unset_tokens(values: Mapping[str, Any]) -> frozenset[str]:
    """Tokens to choose from memory although their switch is on: those of the critic's update, if only those of its values are set.

    values: the keys that the user has set.
    """
    keys = RL["update critic"]
    is_on = filled_by_tokens(values).get(keys.switch)
    return frozenset({keys.tokens}) if is_on and values.get(keys.tokens) is None else frozenset()
