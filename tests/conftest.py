"""Settings for all tests, and the Ray cluster that they share."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

from lockstep.config.estimators import ESTIMATOR_INPUTS
from lockstep.registry import USER_MODULE, Registry, _module_of
from lockstep.utils.determinism import prepare_cublas
from lockstep.utils.distributed import leave_process_group
from lockstep.utils.host import choose_matrix_library

if TYPE_CHECKING:
    from tests.engines.train.ranks import Ranks
    from tests.shared_processes import SharedProcesses

prepare_cublas()  # before any product: cuBLAS and torch read it once
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback only; Ray reads it on import

# deterministic examples and no deadline, so that a busy machine does not fail tests
hypothesis.settings.register_profile("lockstep", derandomize=True, deadline=None)
hypothesis.settings.load_profile("lockstep")

choose_matrix_library()  # as in runs: whether a test is the first to load a model changes no bits


ON_SHARED_RAY = (
    "tests/demo/test_calculator.py",
    "tests/docs/test_commands.py::test_one_command_per_page_trains_on_ray",
    "tests/docs/test_tutorials.py::test_the_tutorial_runs[scaling_out]",
    "tests/examples/test_recipes.py::test_recipe_trains_scaled_down",
    "tests/single_controller/test_contract.py",
    "tests/single_controller/test_message_process.py",
    "tests/single_controller/test_ray.py",
    "tests/single_controller/test_verl_groups.py",
    "tests/single_controller/test_verl_policy_groups.py",
    "tests/trainer/test_async_on_ray.py",
    "tests/trainer/test_deepspeed.py::test_two_processes",
    "tests/trainer/test_deepspeed.py::test_a_run_resumes",
    "tests/trainer/test_megatron.py",
    "tests/trainer/test_megatron_processes.py::test_a_killed_run_resumes_bit_for_bit[2-tp]",
    "tests/trainer/test_replay_on_ray.py",
    "tests/trainer/test_scale.py",
    "tests/verl/test_seeds.py",
)
"""Tests that use `ray_cluster` or `shared_processes`: one process runs all of them, and starts Ray once."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that at the end no process has a long file left while the others are idle."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests stay alive: do not scan them in every garbage collection, which would take a third of the time."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` in the order of collection, with ON_SHARED_RAY as one file."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(ON_SHARED_RAY) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="module")
def ranks() -> Iterator["Ranks"]:
    from tests.engines.train.ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _keep_mkldnn() -> Iterator[None]:
    """torch disables mkldnn for the process at the first bf16 product on a CPU without bf16, which changes float32 bits."""
    enabled = torch.backends.mkldnn.enabled
    yield
    torch._C._set_mkldnn_enabled(enabled)


@pytest.fixture(autouse=True, scope="module")
def _leave_process_group() -> Iterator[None]:
    """An engine in the test process creates a process group of one rank, which no other file's tests may meet.

    vLLM holds on to the group that it found first.
    """
    yield
    if "vllm" not in sys.modules:
        leave_process_group()


@pytest.fixture
def no_registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the package's own entries at the start; undo what user code registers, and forget the files that were loaded."""
    import lockstep.trainer.ppo.task_runner  # noqa: F401 (loads every registry)

    inputs, names = dict(ESTIMATOR_INPUTS), [(registry._names, set(registry._names)) for registry in Registry.instances]
    for registry in Registry.instances:
        own = {name: entry for name, entry in registry._entries.items() if _module_of(entry).startswith("lockstep.")}
        monkeypatch.setattr(registry, "_entries", own)
    yield
    for module in [name for name in sys.modules if name.startswith(USER_MODULE)]:
        del sys.modules[module]
    ESTIMATOR_INPUTS.clear()
    ESTIMATOR_INPUTS.update(inputs)
    for known, before in names:
        known &= before


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A small local cluster, even if the environment names another."""
    pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')
    from lockstep.single_controller.ray_backend import connect, disconnect

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_ADDRESS", "local")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_worker_niceness", "0")  # else other tests on the same cores starve them
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        connect(
            num_cpus=8, log_to_driver=False, logging_level="ERROR", object_store_memory=256 << 20, namespace="tests"
        )
        yield
        disconnect()


@pytest.fixture(scope="session")
def shared_processes(ray_cluster: None) -> "SharedProcesses":
    """Six worker processes on the cluster."""
    from tests.shared_processes import SharedProcesses

    return SharedProcesses(6)
