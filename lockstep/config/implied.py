"""Values that follow from what a user set, where the plain default is never what was meant."""

from collections.abc import Mapping
from typing import Any

GROUP_ESTIMATORS = frozenset(
    {
        "egpo",
        "gdpo",
        "gpg",
        "grpo",
        "grpo_passk",
        "grpo_vectorized",
        "maxrl",
        "opo",
        "optimal_token_baseline",
        "reinforce_plus_plus_baseline",
        "rloo",
        "rloo_vectorized",
        "tir_optimal_token_baseline",
    }
)
"""Advantage estimators that compare the samples of one prompt with each other, so that one sample says nothing."""

SAMPLES_OF_A_GROUP = 5
"""Samples per prompt for these, where the user leaves the number open."""


def implied_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What follows from the values that are set (canonical keys), with a notice each; what is set itself stands."""
    implied: dict[str, Any] = {}
    notices: list[str] = []
    coefficients = sorted(name for name in values if name.startswith("algorithm.kl_ctrl."))
    if coefficients and "algorithm.use_kl_in_reward" not in values:
        implied["algorithm.use_kl_in_reward"] = True
        notices.append(
            f"{coefficients[0]} is set, so the KL penalty in the reward is on; "
            "algorithm.use_kl_in_reward=false trains without it"
        )
    estimator = values.get("algorithm.adv_estimator")
    if estimator in GROUP_ESTIMATORS and "actor_rollout_ref.rollout.n" not in values:
        implied["actor_rollout_ref.rollout.n"] = SAMPLES_OF_A_GROUP
        notices.append(
            f"actor_rollout_ref.rollout.n is not set, and {estimator} compares the samples of a prompt: "
            f"{SAMPLES_OF_A_GROUP} are taken"
        )
    return implied, notices
