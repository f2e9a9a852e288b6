"""Whether this machine's matrix products allow exact mode (`kernels/exact.py`)."""

import pytest
import torch

from lockstep.models.exact_models import check_exact
from tests.engines.rollout.rollout_cases import tiny_model


def skip_unless_exact() -> None:
    """Libraries do not promise it. Where it does not hold, exact mode is refused."""
    torch.manual_seed(0)
    try:
        check_exact(tiny_model("qwen2"))
    except ValueError as error:
        pytest.skip(str(error))
