"""Training with images on a GPU: in float32 as transformers row by row, in bfloat16 close to it, with checkpointed layers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import EngineModel, MicroBatching
from tests.engines.train.test_vision_engine import batch_for, expected_gradients, gradients, weighted
from tests.models.vision_families import FAMILIES, save_tiny_vision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_with_images_on_cuda(name: str, dtype: str, tmp_path: Path) -> None:
    folder = save_tiny_vision(name, tmp_path)
    batch = batch_for(folder, name)
    log_probs, expected = expected_gradients(folder, batch)
    config = FSDPEngineConfig(dtype=dtype, model_dtype="float32")
    model = HFModelConfig(path=str(folder), enable_gradient_checkpointing=True)
    spec = EngineModel(model, "model", "policy", config, optim=FSDPOptimizerConfig(), sequence_parallel_size=1)
    engine = FsdpEngine.open(spec, torch.device("cuda"))
    mask = batch["response_mask"].bool()
    got_log_probs = engine.forward(batch, MicroBatching(num_rows=4))["log_probs"]
    bound = 1e-3 if dtype == "float32" else 0.1
    assert float((got_log_probs - log_probs)[mask].abs().mean()) < bound
    engine.forward_backward(batch, weighted, MicroBatching(num_rows=2))
    if dtype == "float32":
        got = gradients(engine)
        assert got.keys() <= expected.keys()
        for key, gradient in got.items():  # the patches' convolution rounds to TF32
            assert np.linalg.norm(gradient - expected[key]) <= 1e-2 * np.linalg.norm(expected[key]) + 1e-6, key
    assert engine.optimizer_step() > 0
