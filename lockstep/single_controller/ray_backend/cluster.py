"""The Ray cluster: joining or starting it, and what its machines have. The only file that imports ray."""

import os
from collections.abc import Sequence
from typing import Any

try:
    import ray
    import ray.exceptions
    import ray.util
    import ray.util.scheduling_strategies
except ImportError as error:
    raise ImportError('the Ray backend needs Ray: pip install "lockstep-rl[ray]"') from error

Bundle = dict[str, float]
"""Resources by Ray's name of them: {"CPU": 8, "GPU": 8}."""


def connect(num_cpus: int | None = None, address: str | None = None, min_cpus: int = 1, **options: Any) -> None:
    """Join the cluster at `address` (or in RAY_ADDRESS), or start one on this machine; nothing where one is joined already.

    num_cpus: logical CPUs of a cluster started here; by default the machine's cores, at least `min_cpus`, so that more
              workers than cores can be placed.
    options:  further arguments of `ray.init` (`runtime_env`, `namespace`, `log_to_driver`, ...).
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        ray.init(address=address, **options)
    else:
        num_cpus = num_cpus or max(min_cpus, os.cpu_count() or 1)
        ray.init(**{"address": "local", "num_cpus": num_cpus, "include_dashboard": False, **options})


def disconnect(timeline_json_file: str | None = None) -> None:
    """Write the timeline of the run, if a file is given, and leave the cluster; one that `connect` started ends."""
    if not ray.is_initialized():
        return
    if timeline_json_file:
        ray.timeline(timeline_json_file)
    ray.shutdown()


def has_gpus() -> bool:
    """Whether a machine of the cluster has a GPU."""
    return bool(ray.cluster_resources().get("GPU", 0))


def require_machines(pool: str, asked: Sequence[Bundle]) -> None:
    """ValueError where the living machines cannot hold `asked`, one entry per machine, even when nothing else runs."""
    if not ray.is_initialized():
        raise RuntimeError("no Ray cluster is joined: call lockstep.single_controller.ray_backend.connect() first")
    left = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    for bundle in sorted(asked, key=lambda b: (b.get("GPU", 0), b["CPU"]), reverse=True):
        fitting = [m for m in left if all(m.get(name, 0) >= amount for name, amount in bundle.items())]
        if not fitting:
            raise ValueError(missing(pool, asked))
        tightest = min(fitting, key=lambda m: (m.get("GPU", 0), m.get("CPU", 0)))
        for name, amount in bundle.items():
            tightest[name] -= amount


def missing(pool: str, asked: Sequence[Bundle], busy: bool = False) -> str:
    """What a pool asks for and what the cluster has."""
    machines = [
        f"{node['NodeManagerAddress']} with {_amounts(node['Resources'])}" for node in ray.nodes() if node["Alive"]
    ]
    text = (
        f"resource pool {pool!r} asks for {_count(len(asked), 'machine')} with "
        f"{' and '.join(sorted({_amounts(b) for b in asked}))}; "
        f"the Ray cluster has {_count(len(machines), 'machine')}: {', '.join(machines)}"
    )
    if busy:
        return f"{text}. Of that only {_amounts(ray.available_resources())} are free now: end what holds the rest"
    return (
        f"{text}. Lower trainer.n_gpus_per_node or trainer.nnodes, join a larger cluster, "
        f"or raise ray_init.num_cpus where CPUs are short"
    )


def _amounts(resources: Bundle) -> str:
    return f"{resources.get('GPU', 0):g} GPU and {resources.get('CPU', 0):g} CPU"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
