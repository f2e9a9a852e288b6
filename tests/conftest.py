"""Settings for all tests."""

import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from lockstep.config.estimators import ESTIMATOR_INPUTS
from lockstep.registry import USER_MODULE, Registry, _module_of

# deterministic examples and no deadline, so that a busy machine does not fail tests
hypothesis.settings.register_profile("lockstep", derandomize=True, deadline=None)
hypothesis.settings.load_profile("lockstep")


@pytest.fixture(autouse=True)
def _keep_mkldnn() -> Iterator[None]:
    """torch disables mkldnn for the process at the first bf16 product on a CPU without bf16, which changes float32 bits."""
    enabled = torch.backends.mkldnn.enabled
    yield
    torch._C._set_mkldnn_enabled(enabled)


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
