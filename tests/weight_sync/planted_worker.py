"""Weight updates inside vLLM's worker that can be told to do one thing wrong."""

from typing import Any

from lockstep.engines.rollout.vllm_worker import WeightUpdates

PLANTED = f"{__name__}.PlantedUpdates"
_tie_head, _finish_update = WeightUpdates.lockstep_tie_head, WeightUpdates.lockstep_finish_update


class PlantedUpdates(WeightUpdates):
    """For a server. In this process `METHODS` replace those of WeightUpdates: vLLM adds one extension to its worker class.

    lockstep_defect: old head | old head unnoticed | changed norm, or nothing.
    """

    lockstep_defect: str = ""

    def lockstep_plant(self, defect: str) -> None:
        self.lockstep_defect = defect

    def lockstep_tie_head(self, model: Any) -> None:
        if not self.lockstep_defect.startswith("old head"):
            _tie_head(self, model)

    def lockstep_finish_update(self) -> str:
        problem = _finish_update(self)
        if self.lockstep_defect == "changed norm":
            self.lockstep_model().model.norm.weight.data.add_(1e-6)
        return "" if self.lockstep_defect == "old head unnoticed" else problem


METHODS = {name: value for name, value in vars(PlantedUpdates).items() if name.startswith("lockstep_")}
