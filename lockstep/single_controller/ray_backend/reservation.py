"""Placement groups, and worker processes in them.

Needs neither torch nor a worker class, so that processes can be started early and import while the controller does.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.single_controller.environment import ProcessEnvironment
from lockstep.single_controller.ray_backend.cluster import Bundle, ray
from lockstep.single_controller.ray_backend.host import WorkerHost


def bundle_of(use_gpu: bool) -> Bundle:
    """The resources of one process."""
    return {"CPU": 1, "GPU": 1} if use_gpu else {"CPU": 1}


def reserve(name: str, process_on_nodes: Sequence[int], bundle: Bundle, detached: bool = False) -> list[Any]:
    """Create a placement group per machine with a bundle per process; they may not be ready yet."""
    return [
        ray.util.placement_group(
            [bundle] * count,
            strategy="STRICT_PACK",
            name=f"{name}:{i}",
            lifetime="detached" if detached else None,
        )
        for i, count in enumerate(process_on_nodes)
    ]


def start_host(
    group: Any, index: int, share: float, use_gpu: bool, name: str, preload: Sequence[str] = (), **options: Any
) -> Any:
    """Start a worker process in a bundle of a placement group.

    share: the fraction of the bundle that it takes. preload: modules to import. options: Ray actor options; with those of `nsight`
    the process runs under nsys, and `o` is the folder of its report.
    """
    if nsight := options.get("runtime_env", {}).get("nsight"):
        report = f"{nsight['o']}/{name.replace(':', '_rank')}"
        options["runtime_env"] = options["runtime_env"] | {"nsight": nsight | {"o": report}}
    options = {
        "name": name,
        "num_cpus": share,
        "num_gpus": share if use_gpu else 0,
        "scheduling_strategy": ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        ),
    } | options
    return ray.remote(WorkerHost).options(**options).remote(ProcessEnvironment.capture(), tuple(preload))


@dataclass(frozen=True)
class StartedProcesses:
    """Processes of a pool whose workers are not constructed yet.

    handles, names: by rank.
    """

    process_on_nodes: list[int]
    use_gpu: bool
    placement_groups: list[Any]
    handles: list[Any]
    names: list[str]


def start_early(
    pool: str, process_on_nodes: Sequence[int], use_gpu: bool, preload: Sequence[str], **options: Any
) -> StartedProcesses:
    """Reserve the machines of a pool and start its processes, which import `preload`. options: Ray actor options."""
    unique = f"{pool}-{uuid.uuid4().hex[:6]}"
    groups = reserve(unique, process_on_nodes, bundle_of(use_gpu))
    places = [(group, i) for group, count in zip(groups, process_on_nodes) for i in range(count)]
    names = [f"{unique}:{rank}" for rank in range(len(places))]
    handles = [start_host(*place, 1, use_gpu, name, preload, **options) for place, name in zip(places, names)]
    return StartedProcesses(list(process_on_nodes), use_gpu, groups, handles, names)
