"""verl.single_controller.base.worker"""

from collections.abc import Mapping
from typing import Any

from lockstep import single_controller
from lockstep.verl._names import exports

__getattr__ = exports(__name__)


class Worker(single_controller.Worker):
    """Base of a program's own workers."""

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """By mesh, this worker's part of a batch (`dispatch_dp_rank`) and whether its output counts (`collect_dp_rank`)."""
        meshes = self._meshes.items()
        return {
            "dispatch_dp_rank": {name: dp_rank for name, (dp_rank, _) in meshes},
            "collect_dp_rank": {name: is_collect for name, (_, is_collect) in meshes},
        }

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: Mapping[str, int], collect_dp_rank: Mapping[str, bool]
    ) -> None:
        """Take over one mesh of another worker: `self.set_dispatch_collect("actor", **inner.get_dispatch_collect())`.

        The other worker has the mesh by the same name, or it has only one.
        """
        name = mesh_name if mesh_name in dispatch_dp_rank else next(iter(dispatch_dp_rank), None)
        if name is None or (name != mesh_name and len(dispatch_dp_rank) > 1):
            known = ", ".join(dispatch_dp_rank) or "none"
            raise AssertionError(
                f"set_dispatch_collect: the other worker has no mesh {mesh_name!r} (its meshes: {known})"
            )
        self._register_dispatch_collect_info(mesh_name, dispatch_dp_rank[name], collect_dp_rank[name])

    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether this worker's output counts in a mesh."""
        if mesh_name not in self._meshes:
            raise AssertionError(f"mesh {mesh_name!r} is not registered in {type(self).__name__}")
        return self._meshes[mesh_name][1]
