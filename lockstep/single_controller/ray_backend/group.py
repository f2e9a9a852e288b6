"""RayWorkerGroup: the workers of one role as Ray actors, one process each.

start      reserve the pool's machines, start one WorkerHost per process, set each one's rank and master address,
           construct the workers
call       a DataProto goes through the object store, split by rows; what several ranks get is stored once
future     holds Ray's reference; if passed to another group, that group's workers fetch the output directly
shutdown   stops the processes; the last group of a pool releases its machines
"""

import functools
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

from lockstep.protocol import DataProtoFuture
from lockstep.single_controller.dispatch import (
    Execute,
    collect_dp_compute_data_proto,
    collect_nd_compute_dataproto,
    registered_methods,
)
from lockstep.single_controller.futures import FutureList
from lockstep.single_controller.ray_backend.cluster import ray, session
from lockstep.single_controller.ray_backend.futures import (
    DEATH_ERRORS,
    DEATH_NOTICE_S,
    PROBES,
    LivenessProbe,
    RayFuture,
)
from lockstep.single_controller.ray_backend.host import ProcessInfo
from lockstep.single_controller.ray_backend.pool import RayResourcePool
from lockstep.single_controller.ray_backend.reservation import StartedProcesses, start_host
from lockstep.single_controller.ray_backend.serialize import pack
from lockstep.single_controller.worker import Place
from lockstep.single_controller.worker_group import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup
from lockstep.utils import heartbeat

JOINING = (collect_dp_compute_data_proto, collect_nd_compute_dataproto)
"""Collect functions that copy the outputs into one batch."""

SMALL = (type(None), bool, int, float, str, ray.ObjectRef, DataProtoFuture)
"""Types of arguments that are cheaper to send than to store, or are stored already."""

RESTART_WAIT_S = 60.0
"""How long `restart` waits for machines."""

SHUTDOWN_TIMEOUT_S = 5.0
"""How long `shutdown` waits for processes to exit."""


class RayClassWithInitArgs(ClassWithInitArgs):
    """A class, its constructor arguments and the options of its actors."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}

    def update_options(self, options: dict[str, Any]) -> None:
        """Add Ray actor options: {"runtime_env": {...}}, {"resources": {...}}."""
        self.options.update(options)


class Processes:
    """The actors of one or several groups (`spawn` creates several on the same actors).

    handles, names, infos: by rank.
    master:                address and port for `torch.distributed`.
    pool:                  released when the processes have exited; None if this program did not reserve it.
    """

    def __init__(self, handles: list[Any], names: list[str], pool: RayResourcePool | None) -> None:
        self.handles = handles
        self.names = names
        self.pool = pool
        self.infos: list[ProcessInfo] = []
        self.master = ("", 0)
        self._session = session()
        self._probes: list[LivenessProbe] = []

    def watch(self, site: Callable[[int], str]) -> None:
        """Detect the death of a process during any call. site: describes a rank in the error message."""
        self._probes = [
            LivenessProbe(handle, functools.partial(site, rank)) for rank, handle in enumerate(self.handles)
        ]
        PROBES.update(self._probes)

    def tolerate_deaths(self) -> None:
        """Calls on other processes do not fail if one of these dies."""
        for probe in self._probes:
            probe.is_tolerated = True

    def shutdown(self) -> None:
        """Stop the processes and wait until they have exited; a second call is a no-op."""
        PROBES.difference_update(self._probes)
        handles, self.handles[:] = list(self.handles), []
        if not handles or not ray.is_initialized() or session() != self._session:
            return
        for handle in handles:
            ray.kill(handle, no_restart=True)
        pings = [handle.place.remote() for handle in handles]  # each fails once Ray knows that the actor is dead
        ray.wait(pings, num_returns=len(pings), timeout=SHUTDOWN_TIMEOUT_S)
        if self.pool is not None:
            self.pool.release()
        else:
            for group in {info.placement_group.id: info.placement_group for info in self.infos}.values():
                ray.util.remove_placement_group(group)


class RayWorkerGroup(WorkerGroup):
    """One actor per process of the pool.

    name_prefix: prefix of the actors' names; the pool's name by default.
    detached:    the actors outlive this program; `from_detached` attaches to them.

    Use it as a context manager, or call `shutdown`, to stop the actors before the program exits.
    """

    _processes: Processes
    _host_method: ClassVar[str] = "call"

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        name: str | None = None,
        name_prefix: str | None = None,
        detached: bool = False,
    ) -> None:
        self._name_prefix = name_prefix or resource_pool.name_prefix
        self._detached = detached or resource_pool.detached
        super().__init__(resource_pool, ray_cls_with_init, name)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] = (),
        ray_cls_with_init: ClassWithInitArgs | None = None,
        name: str | None = None,
    ) -> Self:
        """Attach to running workers by their `worker_names`; `shutdown` then stops them and releases their machines."""
        if not worker_names or ray_cls_with_init is None:
            raise ValueError("from_detached needs worker_names, in rank order, and ray_cls_with_init")
        try:
            handles = [ray.get_actor(worker_name) for worker_name in worker_names]
        except ValueError as error:
            raise ValueError(
                f"from_detached: no such worker in the Ray namespace {ray.get_runtime_context().namespace!r}: {error}"
            ) from None
        places: list[Place] = ray.get([handle.place.remote() for handle in handles])
        pool = ResourcePool([p.local_world_size for p in places if p.local_rank == 0], name_prefix=name_prefix or "")
        if [place.rank for place in places] != list(range(pool.world_size)):
            raise ValueError(
                f"from_detached: the workers {list(worker_names)} have ranks {[p.rank for p in places]}; "
                f"give all {places[0].world_size} names of the group in rank order"
            )
        group = object.__new__(cls)
        group._set_up(pool, ray_cls_with_init, name)
        group._processes = Processes(handles, list(worker_names), pool=None)
        group._processes.infos = ray.get([handle.info.remote() for handle in handles])
        (group._processes.master,) = ray.get([handles[0].master.remote()])
        group.workers = handles
        return group

    def _set_up(
        self, resource_pool: ResourcePool, cls_with_init: ClassWithInitArgs, name: str | None, method_prefix: str = ""
    ) -> None:
        super()._set_up(resource_pool, cls_with_init, name, method_prefix)
        self._joining = {
            method_prefix + method_name
            for method_name, registration in registered_methods(cls_with_init.cls).items()
            if getattr(registration.mode["collect_fn"], "func", registration.mode["collect_fn"]) in JOINING
        }

    def _start_workers(self) -> list[Any]:
        self._processes = self._start_processes()
        handles = self._processes.handles
        try:
            asked = [RayFuture(h.info.remote(), self._site(rank, "__init__")) for rank, h in enumerate(handles)]
            self._processes.infos = infos = RayFuture.get_all(asked)
            port = RayFuture(handles[0].free_port.remote(), self._site(0, "__init__")).get()
            self._processes.master = (infos[0].address, port)
            construct = ray.put(self.cls_with_init)
            RayFuture.get_all([self._construct(rank, construct) for rank in range(self.world_size)])
        except BaseException:  # including Ctrl-C: leave no actors behind
            self.shutdown()
            raise
        return handles

    def _start_processes(self) -> Processes:
        """One actor per bundle of the pool."""
        pool = self.resource_pool
        if not isinstance(pool, RayResourcePool):
            raise TypeError(f"a RayWorkerGroup needs a RayResourcePool, not a {type(pool).__name__}")
        pool.acquire(self.name)
        processes = Processes([], [], pool)
        try:
            self._fill(processes, pool)
            processes.watch(self._site)
        except BaseException:
            processes.shutdown() if processes.handles else pool.release()
            raise
        return processes

    def _fill(self, processes: Processes, pool: RayResourcePool) -> None:
        groups = pool.get_placement_groups()
        options = getattr(self.cls_with_init, "options", {})
        if not options and not self._detached and (early := pool.take_early()) is not None:
            processes.handles.extend(early.handles)
            processes.names.extend(early.names)
            return
        options = {"lifetime": "detached" if self._detached else None} | pool.actor_options | options
        unique = f"{self._name_prefix}{'_' if self._name_prefix else ''}{self.name}-{uuid.uuid4().hex[:6]}"
        for group, count in zip(groups, pool.store):
            for index in range(count):
                name = f"{unique}:{len(processes.names)}"
                processes.handles.append(start_host(group, index, pool.share, pool.use_gpu, name, **options))
                processes.names.append(name)

    def _construct(self, rank: int, construct: Any) -> RayFuture:
        place = self.resource_pool.places()[rank]
        address, port = self._processes.master
        sees_one_gpu = getattr(self.resource_pool, "use_gpu", False)  # torch uses LOCAL_RANK as the device index
        environment = {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": "0" if sees_one_gpu else str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        note = self.failure_note(rank, "__init__")
        role = "+".join(getattr(self.cls_with_init.cls, "roles", [])) or self.name
        handle = self._processes.handles[rank]
        ref = handle.construct.remote(construct, place, environment, note, role, heartbeat.current_link())
        return RayFuture(ref, self._site(rank, "__init__"))

    def _execute(
        self,
        method_name: str,
        execute_mode: Execute,
        shares: Sequence[Sequence[Any]],
        named_shares: dict[str, Sequence[Any]],
    ) -> FutureList:
        shares = [_store_shared(share) for share in shares]
        named_shares = {name: _store_shared(share) for name, share in named_shares.items()}
        return super()._execute(method_name, execute_mode, shares, named_shares)

    def _submit(self, rank: int, method_name: str, args: list[Any], kwargs: dict[str, Any]) -> RayFuture:
        return self._call(rank, method_name, args, kwargs, writable=method_name not in self._joining)

    def _call(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: dict[str, Any], writable: bool = True
    ) -> RayFuture:
        if not self._processes.handles:
            raise RuntimeError(f"worker group {self.name!r} is shut down")
        note = self.failure_note(rank, method_name)
        packed = {name: pack(arg) for name, arg in kwargs.items()}
        call = getattr(self.workers[rank], self._host_method)
        ref = call.remote(method_name, note, *[pack(arg) for arg in args], **packed)
        return RayFuture(ref, self._site(rank, method_name), writable)

    def failure_note(self, rank: int, method_name: str) -> str:
        return f"{super().failure_note(rank, method_name)}, {self._node(rank)}"

    def _site(self, rank: int, method_name: str | None = None) -> str:
        site = f"worker group {self.name!r}, rank {rank} of {self.world_size}, {self._node(rank)}"
        if method_name is None:
            return site
        method = f"{self.cls_with_init.cls.__name__}.{method_name.removeprefix(self._method_prefix)}"
        return f"{site}, called for {method}"

    def _node(self, rank: int) -> str:
        infos = self._processes.infos
        return f"node {infos[rank].address}, pid {infos[rank].pid}" if infos else "being started"

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> RayFuture:
        """Call any method of rank 0, registered or not."""
        return self._call(0, self._method_prefix + method_name, args, kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Like `execute_rank_zero_async`, but returns the output."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> FutureList:
        """Call any method of every rank, registered or not, with the same arguments."""
        if self.world_size > 1:
            args = tuple(_stored(arg) for arg in args)
            kwargs = {name: _stored(arg) for name, arg in kwargs.items()}
        method_name = self._method_prefix + method_name
        return FutureList(self._call(rank, method_name, args, kwargs) for rank in range(self.world_size))

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Like `execute_all_async`, but returns the outputs in rank order."""
        return self.execute_all_async(method_name, *args, **kwargs).get()

    @property
    def master_address(self) -> str:
        return self._processes.master[0]

    @property
    def master_port(self) -> int:
        return self._processes.master[1]

    @property
    def worker_names(self) -> list[str]:
        """The actors' names in rank order, for `from_detached`."""
        return list(self._processes.names)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        groups = super().spawn(prefix_set)
        for group in groups.values():
            group._processes = self._processes
        return groups

    def dead_ranks(self) -> list[int]:
        pings = [handle.place.remote() for handle in self._processes.handles]
        ready = set(ray.wait(pings, num_returns=len(pings), timeout=DEATH_NOTICE_S)[0]) if pings else set()
        dead = []
        for rank, ping in enumerate(pings):
            try:
                if ping in ready:
                    ray.get(ping)
            except DEATH_ERRORS:
                dead.append(rank)
        return dead

    def tolerate_deaths(self) -> None:
        self._processes.tolerate_deaths()

    def restart(self) -> None:
        """See `WorkerGroup.restart`; waits for a machine that replaces a lost one."""
        processes, pool = self._processes, self.resource_pool
        processes.shutdown()
        if isinstance(pool, RayResourcePool):
            pool.wait_s, pool.wait_for_machines = RESTART_WAIT_S, True
        handles = self._start_workers()
        vars(processes).update(vars(self._processes))
        self._processes = processes  # which spawned groups have too
        self.workers[:] = handles

    def shutdown(self) -> None:
        """Stop the workers, including those of groups spawned from this one."""
        self._processes.shutdown()


def _store_shared(share: Sequence[Any]) -> Sequence[Any]:
    """Store what several ranks get once, and pass its reference."""
    counts = Counter(map(id, share))
    distinct = {id(arg): arg for arg in share}
    passed = {key: arg if counts[key] == 1 else _stored(arg) for key, arg in distinct.items()}
    return [passed[id(arg)] for arg in share]


def _stored(arg: Any) -> Any:
    return arg if isinstance(arg, SMALL) else ray.put(pack(arg))


def make_ray_backend(
    use_gpu: bool,
    wait_s: float | None = None,
    started: dict[str, StartedProcesses] | None = None,
    actor_options: dict[str, Any] | None = None,
) -> Backend:
    """Workers as Ray processes, each with one GPU or one logical CPU.

    wait_s:        how long to wait for machines that have not joined yet.
    started:       processes started early, by pool.
    actor_options: Ray options of the others.
    """
    options: dict[str, Any] = {} if wait_s is None else {"wait_s": wait_s, "wait_for_machines": True}
    options |= {"started": started, "actor_options": actor_options}
    pool_class = functools.partial(RayResourcePool, use_gpu=use_gpu, **options)
    return Backend("ray", pool_class, RayClassWithInitArgs, RayWorkerGroup)
