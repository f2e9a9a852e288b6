"""WorkerGroup: the controller's handle on the workers of one role.

    group.update(data)
      1. dispatch  `@register` on the worker's method defines how `data` is split into one share per rank
      2. execute   every rank runs its method on its share; only this step differs between backends
      3. collect   the outputs become one result; a non-blocking method returns it as a future

A backend is a subclass of WorkerGroup that starts workers and submits a call to one of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lockstep.registry import did_you_mean
from lockstep.single_controller.dispatch import Execute, Mesh, Registration, registered_methods
from lockstep.single_controller.futures import Future, FutureList
from lockstep.single_controller.worker import Place


class ResourcePool:
    """How many worker processes run on each machine.

    process_on_nodes:   processes per machine, [8, 8] for two machines of eight.
    max_colocate_count: how many worker groups may share the pool.
    n_gpus_per_node:    devices per machine.
    name_prefix:        name of the pool in messages and in the backend.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
        name_prefix: str = "",
    ) -> None:
        self._store: list[int] = []
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node
        self.name_prefix = name_prefix
        for process_count in process_on_nodes or ():
            self.add_node(process_count)

    def add_node(self, process_count: int) -> None:
        """Add a machine with `process_count` processes."""
        if process_count < 1:
            raise ValueError(f"resource pool {self.name_prefix!r}: a machine with {process_count} processes")
        self._store.append(process_count)

    @property
    def store(self) -> list[int]:
        """Processes per machine."""
        return list(self._store)

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of processes on its machine."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its local rank."""
        return [i for count in self._store for i in range(count)]

    def shutdown(self) -> None:
        """Release reserved machines; no-op for local workers."""

    def places(self) -> list[Place]:
        """The place of each rank."""
        pairs = zip(self.local_rank_list(), self.local_world_size_list())
        return [Place(rank, self.world_size, local, local_size) for rank, (local, local_size) in enumerate(pairs)]


class ClassWithInitArgs:
    """A class and its constructor arguments, for deferred construction."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


class WorkerGroup(ABC):
    """Every `@register`ed method of the worker class, as one call on all workers.

    resource_pool: how many workers, and where.
    cls_with_init: the worker class and its arguments.
    name:          the role's name in error messages; the class's name by default.
    """

    def __init__(self, resource_pool: ResourcePool, cls_with_init: ClassWithInitArgs, name: str | None = None) -> None:
        if resource_pool.world_size < 1:
            raise ValueError(f"resource pool {resource_pool.name_prefix!r} has no processes")
        self._set_up(resource_pool, cls_with_init, name)
        self.workers.extend(self._start_workers())

    def _set_up(
        self, resource_pool: ResourcePool, cls_with_init: ClassWithInitArgs, name: str | None, method_prefix: str = ""
    ) -> None:
        self.resource_pool = resource_pool
        self.cls_with_init = cls_with_init
        self.name = name or cls_with_init.cls.__name__
        self._method_prefix = method_prefix
        self._meshes: dict[str, Mesh] = {}
        self.workers: list[Any] = []
        for method_name, registration in registered_methods(cls_with_init.cls).items():
            if hasattr(type(self), method_name):
                raise ValueError(f"{cls_with_init.cls.__name__}.{method_name}: worker groups use that name, rename it")
            setattr(self, method_name, self._bind(method_name, registration))

    def _bind(self, method_name: str, registration: Registration) -> Callable[..., Any]:
        """The worker's method as a method of the group: dispatch, execute, collect."""
        mode = registration.mode

        def call(*args: Any, **kwargs: Any) -> Any:
            shares, named_shares = mode["dispatch_fn"](self, *args, **kwargs)
            outputs = self._execute(method_name, registration.execute_mode, shares, named_shares)
            return mode["collect_fn"](self, outputs.get() if registration.blocking else outputs)

        call.__name__ = method_name
        call.__doc__ = getattr(self.cls_with_init.cls, method_name).__doc__
        return call

    def _execute(
        self,
        method_name: str,
        execute_mode: Execute,
        shares: Sequence[Sequence[Any]],
        named_shares: dict[str, Sequence[Any]],
    ) -> FutureList:
        """Submit its share to each rank."""
        ranks = range(1 if execute_mode is Execute.RANK_ZERO else self.world_size)
        for share in (*shares, *named_shares.values()):
            if len(share) != len(ranks):
                raise ValueError(f"{self.name}.{method_name}: dispatch made {len(share)} shares for {len(ranks)} ranks")
        return FutureList(
            self._submit(
                rank,
                self._method_prefix + method_name,
                [share[rank] for share in shares],
                {name: share[rank] for name, share in named_shares.items()},
            )
            for rank in ranks
        )

    def call_rank(self, rank: int, method_name: str, *args: Any) -> Future:
        """Start a method of one worker, registered or not."""
        return self._submit(rank, self._method_prefix + method_name, list(args), {})

    @abstractmethod
    def _start_workers(self) -> list[Any]:
        """Construct one worker, or a handle to one, for each of `resource_pool.places()`."""

    @abstractmethod
    def _submit(self, rank: int, method_name: str, args: list[Any], kwargs: dict[str, Any]) -> Future:
        """Start `method_name(*args, **kwargs)` on one worker; its exception gets `failure_note` and is raised by `get`."""

    def failure_note(self, rank: int, method_name: str) -> str:
        """The note that says which worker raised an exception."""
        method = f"{self.cls_with_init.cls.__name__}.{method_name.removeprefix(self._method_prefix)}"
        return f"raised in worker group {self.name!r} by {method} on rank {rank} of {self.world_size}"

    @property
    def world_size(self) -> int:
        return self.resource_pool.world_size

    def mesh(self, name: str) -> Mesh:
        """The mesh that the workers registered under `name`."""
        if name not in self._meshes:
            self._meshes[name] = _make_mesh(name, self._query_dispatch_collect_info(name))
        return self._meshes[name]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """One group per role of a colocated group, all on the same workers, with unprefixed method names."""
        roles: dict[str, ClassWithInitArgs] = getattr(self.cls_with_init.cls, "roles", {})
        groups = {}
        for role in prefix_set:
            if role not in roles:
                raise ValueError(f"worker group {self.name!r} has no role {role!r}. {did_you_mean(role, roles)}")
            group = object.__new__(type(self))
            group._set_up(self.resource_pool, roles[role], role, method_prefix=f"{role}_")
            group.workers = self.workers
            groups[role] = group
        return groups

    def dead_ranks(self) -> list[int]:
        """Ranks whose process is known to be dead; none if workers are local."""
        return []

    def tolerate_deaths(self) -> None:  # noqa: B027
        """Calls on other groups do not fail if a process of this one dies: it can be restarted. No-op for local workers."""

    def restart(self) -> None:
        """Start all workers again, in new processes, also for groups spawned from this one; models are to be loaded again."""
        raise NotImplementedError(f"workers of {type(self).__name__} cannot be restarted")

    def shutdown(self) -> None:  # noqa: B027
        """Stop the workers, including those of groups spawned from this one; no-op for local workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        # Only reached for missing attributes: the methods of the worker class are bound in _set_up.
        if name.startswith("__") or "cls_with_init" not in self.__dict__:
            raise AttributeError(name)
        cls = self.cls_with_init.cls
        if callable(getattr(cls, name, None)):
            raise AttributeError(f"{cls.__name__}.{name} has no @register, so its worker group cannot call it")
        raise AttributeError(f"{cls.__name__} has no method {name!r}. {did_you_mean(name, registered_methods(cls))}")


def _make_mesh(name: str, infos: Sequence[tuple[int, bool]]) -> Mesh:
    dp_ranks = [dp_rank for dp_rank, _ in infos]
    dp_size = max(dp_ranks) + 1
    collecting = [
        [r for r, (dp, is_collect) in enumerate(infos) if is_collect and dp == part] for part in range(dp_size)
    ]
    for part, ranks in enumerate(collecting):
        if len(ranks) != 1:
            raise ValueError(
                f"mesh {name!r}: data-parallel rank {part} of {dp_size} is collected from ranks {ranks}; "
                f"exactly one rank must register it with is_collect=True"
            )
    return Mesh(dp_ranks, [ranks[0] for ranks in collecting])


@dataclass(frozen=True)
class Backend:
    """The classes needed to build worker groups of one backend.

    pool_class(process_on_nodes=..., max_colocate_count=..., name_prefix=...), class_with_init(cls, *args, **kwargs),
    group_class(resource_pool, cls_with_init).
    """

    name: str
    pool_class: Callable[..., ResourcePool]
    class_with_init: Callable[..., ClassWithInitArgs]
    group_class: Callable[..., WorkerGroup]
