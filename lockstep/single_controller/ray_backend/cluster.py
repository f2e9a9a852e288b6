"""Connect to a Ray cluster or start one, and check its resources. The only file that imports ray."""

import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

try:
    import ray
    import ray.exceptions
    import ray.util
    import ray.util.scheduling_strategies
except ImportError as error:
    raise ImportError('the Ray backend needs Ray: pip install "lockstep-rl[ray]"') from error

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_TIMEOUT_S = 5.0
"""How long to wait for a cluster's address to answer."""

Bundle = dict[str, float]
"""Resources by Ray's names: {"CPU": 8, "GPU": 8}."""


def connect(num_cpus: int | None = None, address: str | None = None, min_cpus: int = 1, **options: Any) -> bool:
    """Connect to the cluster at `address` (or RAY_ADDRESS), or start one on this machine; False if already connected.

    num_cpus: logical CPUs of a cluster started here; by default the machine's cores, at least `min_cpus`, so that more
              workers than cores can be placed.
    options:  further arguments of `ray.init` (`runtime_env`, `namespace`, `log_to_driver`, ...).

    Ray's own messages are shown if LOCKSTEP_DEBUG is set.
    """
    if ray.is_initialized():
        return False
    if not os.environ.get("LOCKSTEP_DEBUG"):
        options = {"logging_level": "ERROR"} | options
        _hide_ray_messages()
    address = address or os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        num_cpus = num_cpus or max(min_cpus, os.cpu_count() or 1)
        ray.init(**{"address": "local", "num_cpus": num_cpus, "include_dashboard": False, **options})
        return True
    if "://" in address:
        raise ValueError(
            f"ray_init.address={address} (or RAY_ADDRESS): Ray client is not supported; run the command on a machine of the "
            "cluster with ray_init.address=auto, or submit it: ray job submit -- lockstep ppo ..."
        )
    try:
        _probe(address)
        ray.init(address=address, **options)
    except OSError as error:  # includes Ray's ConnectionError
        raise ValueError(
            f"ray_init.address={address} (or RAY_ADDRESS): no Ray cluster answers there ({' '.join(str(error).split())}). "
            "Start one with `ray start --head`, or leave both unset to start one with the run; if the cluster uses token "
            "authentication, set RAY_AUTH_MODE=token here too"
        ) from error
    return True


def _probe(address: str) -> None:
    """Raise OSError if nothing listens at `host:port`; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()


def _hide_ray_messages() -> None:
    """Hide Ray's own messages but keep the workers' output; Ray has no setting for that."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray\.")
    module: Any = ray._private.worker
    show = getattr(module, "print_to_stdstream", None)
    if show is None or hasattr(show, "shows_only_workers"):
        return

    def show_workers(data: dict[str, Any], **options: Any) -> None:
        if str(data.get("pid")).isdigit():  # Ray's own processes have a name instead
            show(data, **options)

    show_workers.shows_only_workers = True  # type: ignore[attr-defined]
    module.print_to_stdstream = show_workers


def disconnect(timeline_json_file: str | None = None, leave: bool = True) -> None:
    """Write the run's timeline if a file is given, and `leave` the cluster; a cluster started by `connect` is shut down."""
    if not ray.is_initialized():
        return
    if timeline_json_file and head_answers():
        Path(timeline_json_file).expanduser().absolute().parent.mkdir(parents=True, exist_ok=True)
        ray.timeline(timeline_json_file)
    if leave:
        ray.shutdown()


def session() -> tuple[str, str]:
    """Identifies this connection to a cluster; handles and references of another one are invalid."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def head_answers() -> bool:
    """Whether the cluster's head process (GCS) accepts connections; without it most of Ray's calls block."""
    try:
        _probe(ray.get_runtime_context().gcs_address)
    except OSError:
        return False
    return True


def address_for_workers() -> str:
    """The address of this machine for the processes of the cluster; the loopback if there is no other machine."""
    num_machines = sum(bool(node["Alive"]) for node in ray.nodes())
    return "127.0.0.1" if num_machines == 1 else str(ray.util.get_node_ip_address())


def this_machine() -> Any:
    """Scheduling strategy that places an actor on this machine."""
    node = ray.get_runtime_context().get_node_id()
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def own_address() -> str:
    """Of this machine, as the others of the cluster see it."""
    return str(ray.util.get_node_ip_address())


def node_of(number: int) -> Any:
    """Scheduling strategy that spreads numbered actors over the live machines; another one takes the place of a lost one."""
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=nodes[number % len(nodes)], soft=True)


def has_gpus() -> bool:
    """Whether the cluster has a GPU."""
    return bool(ray.cluster_resources().get("GPU", 0))


def on_gpu_machines(function: Callable[[], T]) -> list[T]:
    """The results of a function on each live machine that has GPUs. It reserves none, so Ray hides them in CUDA_VISIBLE_DEVICES."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    task = ray.remote(num_cpus=0)(function)
    calls = [task.options(scheduling_strategy=strategy(node_id=node, soft=False)).remote() for node in nodes]
    found: list[T] = ray.get(calls)
    return found


def require_machines(pool: str, asked: Sequence[Bundle], until: float = 0) -> None:
    """Raise ValueError if the live machines cannot fit `asked`, one entry per machine, even when idle.

    until: wait until this `time.monotonic()` for machines to join.
    """
    if not ray.is_initialized():
        raise RuntimeError("not connected to Ray: call lockstep.single_controller.ray_backend.connect() first")
    is_waiting = False
    while not _fits(asked):
        if time.monotonic() >= until:
            raise ValueError(missing(pool, asked))
        if not is_waiting:
            logger.warning("waiting up to %.0f s: %s", until - time.monotonic(), missing(pool, asked))
        is_waiting = True
        time.sleep(1.0)


def _fits(asked: Sequence[Bundle]) -> bool:
    left = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    for bundle in sorted(asked, key=lambda b: (b.get("GPU", 0), b["CPU"]), reverse=True):
        fitting = [m for m in left if all(m.get(name, 0) >= amount for name, amount in bundle.items())]
        if not fitting:
            return False
        tightest = min(fitting, key=lambda m: (m.get("GPU", 0), m.get("CPU", 0)))
        for name, amount in bundle.items():
            tightest[name] -= amount
    return True


def missing(pool: str, asked: Sequence[Bundle], busy: bool = False) -> str:
    """Message with what a pool requests and what the cluster has."""
    machines = [
        f"{node['NodeManagerAddress']} with {_amounts(node['Resources'])}" for node in ray.nodes() if node["Alive"]
    ]
    text = (
        f"{f'resource pool {pool!r}' if pool else 'the run'} needs {_count(len(asked), 'machine')} with "
        f"{' and '.join(sorted({_amounts(b) for b in asked}))}; "
        f"the Ray cluster has {_count(len(machines), 'machine')}: {', '.join(machines)}"
    )
    if busy:
        return f"{text}. Only {_amounts(ray.available_resources())} are free: stop what uses the rest"
    return (
        f"{text}. Lower trainer.n_gpus_per_node or trainer.nnodes, use a larger cluster, "
        f"or raise ray_init.num_cpus if CPUs are short"
    )


def _amounts(resources: Bundle) -> str:
    return f"{resources.get('GPU', 0):g} GPU and {resources.get('CPU', 0):g} CPU"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
