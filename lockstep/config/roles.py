"""Role -> its sections of the config. Everything that has a key for a role asks here."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from lockstep.config.engines import TRAIN_ENGINES

_ARR = "actor_rollout_ref"
FSDP = "fsdp_config"


class Sections(NamedTuple):
    """role: batches, parallel sizes, profiler. fsdp: settings of the FSDP engine. model: the weights. strategy: key of the
    training engine's name."""

    role: str
    fsdp: str
    model: str
    strategy: str

    @property
    def owner(self) -> str:
        """The section that has `strategy`, and the settings of the engines besides FSDP."""
        return self.strategy.removesuffix(".strategy")

    def of_engine(self, name: str) -> str:
        """The settings of an engine. name: `TrainEngineInfo.section`."""
        return self.fsdp if name == FSDP else f"{self.owner}.{name}"

    def engine(self, values: Mapping[str, Any]) -> str:
        """The settings of the engine that the role selects."""
        return self.of_engine(TRAIN_ENGINES.info(values[self.strategy]).section)

    def engines(self) -> dict[str, str]:
        """The sections of all built-in engines, by their names."""
        names = dict.fromkeys(info.section for info in TRAIN_ENGINES.built_in.values())
        return {name: self.of_engine(name) for name in names}

    def config(self, root: Any) -> Any:
        """The section with `strategy`, of a whole config."""
        return attrgetter(self.owner)(root)


def _in(role: str, model: str, engine: str) -> Sections:
    return Sections(role, f"{engine}.{FSDP}", model, f"{role}.strategy")


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
