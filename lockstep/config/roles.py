"""Role -> its sections of the config. Everything that has a key for a role asks here."""

from typing import NamedTuple

_ARR = "actor_rollout_ref"


class Sections(NamedTuple):
    """role: batches, parallel sizes, profiler. engine: settings of the training engine. model: the weights. strategy: key of the
    training engine's name."""

    role: str
    engine: str
    model: str
    strategy: str


def _in(role: str, model: str, engine: str) -> Sections:
    return Sections(role, f"{engine}.fsdp_config", model, f"{role}.strategy")


SECTIONS = {
    "actor": _in(f"{_ARR}.actor", f"{_ARR}.model", f"{_ARR}.actor"),
    "ref": _in(f"{_ARR}.ref", f"{_ARR}.model", f"{_ARR}.ref"),
    "critic": _in("critic", "critic.model", "critic.model"),
    "rm": _in("reward_model", "reward_model.model", "reward_model.model"),
}
"""The roles that have a training engine."""
SUPERVISED = Sections("model.fsdp_config", "model.fsdp_config", "model", "model.strategy")
"""The only model of SFT, reward models and DPO, whose role is `model`."""


def sections_of(role: str) -> Sections:
    """Those of a rollout are the actor's."""
    return SUPERVISED if role == "model" else SECTIONS.get(role, SECTIONS["actor"])
