"""Weight updates inside vLLM's worker that can be told to do one thing wrong."""

from typing import Any

from lockstep.engines.rollout.vllm_worker import WeightUpdates

PLANTED = f"{__name__}.PlantedUpdates"


class PlantedUpdates(WeightUpdates):
    """lockstep_defect: old head | old head unnoticed | changed norm, or nothing."""

    lockstep_defect: str = ""

    def lockstep_plant(self, defect: str) -> None:
        self.lockstep_defect = defect

    def lockstep_tie_head(self, model: Any) -> None:
        if not self.lockstep_defect.startswith("old head"):
            super().lockstep_tie_head(model)

    def lockstep_finish_update(self) -> str:
        problem = super().lockstep_finish_update()
        if self.lockstep_defect == "changed norm":
            self.lockstep_model().model.norm.weight.data.add_(1e-6)
        return "" if self.lockstep_defect == "old head unnoticed" else problem
