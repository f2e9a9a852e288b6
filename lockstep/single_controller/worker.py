"""Worker: base of every class whose methods a worker group calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from lockstep.protocol import DataProto
from lockstep.registry import did_you_mean
from lockstep.single_controller.dispatch import Dispatch, register


@dataclass(frozen=True)
class Place:
    """A worker's rank in its group.

    rank, world_size:             among all workers of the group.
    local_rank, local_world_size: among those on the same machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


_place: ContextVar[Place] = ContextVar("place", default=Place())  # noqa: B039 - Place is frozen


@contextmanager
def worker_place(place: Place) -> Iterator[None]:
    """Workers constructed in the block get `place`; used by backends. Otherwise a worker is rank 0 of 1."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


class Worker:
    """One rank of a role. Subclasses call `super().__init__()` and decorate their methods with `@register`."""

    def __init__(self) -> None:
        self._place = _place.get()
        self._meshes: dict[str, tuple[int, bool]] = {}

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def world_size(self) -> int:
        return self._place.world_size

    @property
    def local_rank(self) -> int:
        return self._place.local_rank

    @property
    def local_world_size(self) -> int:
        return self._place.local_world_size

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Declare which part of a batch split over `mesh_name` this worker gets, and whether its output is collected."""
        if self._meshes.setdefault(mesh_name, (dp_rank, is_collect)) != (dp_rank, is_collect):
            raise ValueError(
                f"mesh {mesh_name!r} is already registered with (dp_rank, is_collect) = {self._meshes[mesh_name]}"
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_collect_info(self, mesh_name: str) -> tuple[int, bool]:
        """(dp_rank, is_collect) of this worker in a mesh."""
        if mesh_name not in self._meshes:
            raise ValueError(
                f"mesh {mesh_name!r} is not registered: {type(self).__name__} must call "
                f"_register_dispatch_collect_info({mesh_name!r}, ...) first. {did_you_mean(mesh_name, self._meshes)}"
            )
        return self._meshes[mesh_name]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., DataProto], *args: Any, **kwargs: Any) -> DataProto:
        """Run `func(worker, rows...)` on every rank with its rows."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(...)` on rank 0."""
        return func(*args, **kwargs)
