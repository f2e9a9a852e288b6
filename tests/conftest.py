"""Settings for all tests."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

# deterministic examples and no deadline, so that a busy machine does not fail tests
hypothesis.settings.register_profile("lockstep", derandomize=True, deadline=None)
hypothesis.settings.load_profile("lockstep")


@pytest.fixture(autouse=True)
def _keep_mkldnn() -> Iterator[None]:
    """torch disables mkldnn for the process at the first bf16 product on a CPU without bf16, which changes float32 bits."""
    enabled = torch.backends.mkldnn.enabled
    yield
    torch._C._set_mkldnn_enabled(enabled)
