"""The Megatron engine on a GPU: kernels, mixed precision, offloading, and two ranks that share the device over gloo."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from lockstep.engines.train.train_engine import MicroBatching
from tests.engines.train import cases
from tests.engines.train.cases import Case, Reference
from tests.engines.train.ranks import Ranks
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=256)


def gpu(compute: torch.dtype = torch.float32, **settings: Any) -> Case:
    return Case(device="cuda", compute=compute, megatron=settings, micro=MicroBatching(num_rows=2))


@pytest.mark.parametrize("settings", [{}, {"tensor_model_parallel_size": 2}], ids=str)
def test_two_ranks_share_the_device(settings: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Over gloo: NCCL refuses two ranks on one device. Gloo cannot send CUDA tensors from stage to stage."""
    expected = Reference(folder, "policy").run()
    case = dataclasses.replace(gpu(**settings), world=2)
    for result in ranks.run(2, cases.train, folder, case):
        np.testing.assert_allclose(result["steps"], expected["steps"], rtol=1e-3)
        for parameter, weight in expected["weights"].items():
            assert np.abs(result["weights"][parameter] - weight).mean() < 1e-5, parameter


def test_fp32_equals_transformers(folder: Path) -> None:
    expected = Reference(folder, "policy").run()
    result = cases.train(folder, gpu())
    np.testing.assert_allclose(result["steps"], expected["steps"], rtol=1e-3)
    for name, weight in expected["weights"].items():
        assert np.abs(result["weights"][name] - weight).mean() < 1e-5, name


@pytest.mark.parametrize("sharded", [True, False])
def test_bf16_agrees_with_fsdp(sharded: bool, folder: Path) -> None:
    expected = cases.train(folder, Case(device="cuda", compute=torch.bfloat16), num_steps=1)
    result = cases.train(folder, gpu(torch.bfloat16, use_distributed_optimizer=sharded), num_steps=1)
    np.testing.assert_allclose(result["steps"], expected["steps"], rtol=0.05, atol=0.02)
    for name, values in expected["outputs"].items():
        assert np.abs(result["outputs"][name] - values).mean() < 0.02, name
    for name, weight in expected["weights"].items():
        assert result["weights"][name].dtype == np.float32
        assert np.abs(result["weights"][name] - weight).mean() < 5e-4, name


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_where_memory_lies_changes_nothing(compute: torch.dtype, folder: Path, tmp_path: Path) -> None:
    away = {"param_offload": True, "optimizer_offload": True, "grad_offload": True}
    expected = cases.train(folder, gpu(compute))
    result = cases.train(folder, gpu(compute, **away))
    assert result["steps"] == expected["steps"]
    assert all(np.array_equal(result["weights"][name], weight) for name, weight in expected["weights"].items())
    saved = cases.save_and_go_on(folder, gpu(compute, **away), tmp_path)
    resumed = cases.load_and_go_on(folder, gpu(compute, **away), tmp_path)
    assert resumed["step"] == saved["step"]
    assert all(np.array_equal(resumed["weights"][name], weight) for name, weight in saved["weights"].items())


def test_offloaded_memory_is_free(folder: Path) -> None:
    engine = cases.build_engine(
        folder, gpu(torch.bfloat16, param_offload=True, optimizer_offload=True, grad_offload=True)
    )
    engine.onload(optimizer=True)
    cases.engine_step(engine, gpu(torch.bfloat16), 0)
    engine.onload(optimizer=True)
    used = torch.cuda.memory_allocated()
    engine.offload()
    assert torch.cuda.memory_allocated() < used
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in engine.stage.gpt.parameters())
    engine.onload()
    assert np.isfinite(cases.outputs_of(engine, gpu(torch.bfloat16))["log_probs"]).all()
