"""The training engine on a GPU: offloading, prefetching and resharding move memory about and change no number."""

import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.engines.train.train_engine import MicroBatching
from lockstep.kernels.packed import packed_view
from lockstep.models.shared_weights import rollout_module
from tests.engines.train import cases
from tests.engines.train.cases import Case, Reference
from tests.engines.train.ranks import Ranks
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=256)


def test_fp32_equals_transformers(folder: Path) -> None:
    expected = Reference(folder, "policy").run()
    result = cases.train(folder, Case(device="cuda"))
    np.testing.assert_allclose(result["steps"], expected["steps"], rtol=1e-3)
    for name, weight in expected["weights"].items():
        assert np.abs(result["weights"][name] - weight).mean() < 1e-5, name


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fsdp",
    [
        {"param_offload": True, "optimizer_offload": True},
        {"offload_policy": True},
        {"offload_policy": True, "param_offload": True},
        {"forward_prefetch": True},
        {"reshard_after_forward": False},
    ],
    ids=str,
)
def test_where_memory_lies_changes_nothing(
    fsdp: dict[str, bool], compute: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    """In half precision a rounding error of the first step grows too fast to compare the later ones."""
    case = Case(device="cuda", compute=compute, fsdp=fsdp, checkpointing=True)
    expected, result = cases.train(folder, Case(device="cuda", compute=compute)), cases.train(folder, case)
    num_steps, tolerance = (3, 1e-4) if compute == torch.float32 else (1, 1e-3)
    np.testing.assert_allclose(result["steps"][:num_steps], expected["steps"][:num_steps], rtol=tolerance)
    uninterrupted = cases.save_and_go_on(folder, case, tmp_path)
    resumed = cases.load_and_go_on(folder, case, tmp_path)
    np.testing.assert_allclose(resumed["step"], uninterrupted["step"], rtol=tolerance)


def test_repeated_updates_are_equal_to_the_bit(folder: Path) -> None:
    case = Case(device="cuda", compute=torch.bfloat16, fsdp={"full_determinism": True}, checkpointing=True)
    first, second = cases.train(folder, case), cases.train(folder, case)
    assert first["steps"] == second["steps"]
    for name, weight in first["weights"].items():
        np.testing.assert_array_equal(second["weights"][name], weight, name)


@pytest.mark.parametrize("fsdp", [{}, {"param_offload": True}, {"offload_policy": True}], ids=str)
def test_lent_weights_are_on_the_device(fsdp: dict[str, bool], folder: Path) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    case = Case(device="cuda", compute=torch.bfloat16, fsdp=fsdp)
    engine = cases.build_engine(folder, case)
    home = "cpu" if fsdp else "cuda"
    module = rollout_module(engine.model.transformer)
    addresses = []
    for _ in range(2):
        with engine.lend_weights(module):
            assert {(p.device.type, p.dtype) for p in module.parameters()} == {("cuda", torch.bfloat16)}
            attention = module.get_decoder().layers[0].self_attn
            assert packed_view([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
            addresses.append([p.data_ptr() for p in module.parameters()])
    if not fsdp.get("param_offload"):
        assert addresses[0] == addresses[1]  # captured graphs remain valid
    assert {p.device.type for p in engine.model.parameters()} == {home}
    if fsdp.get("param_offload"):
        held = torch.cuda.memory_allocated() - before
        assert held < sum(p.numel() for p in engine.model.parameters())  # bytes: not even a compute copy stays
    cases.engine_step(engine, case, 0)
    assert {p.device.type for p in engine.model.parameters()} == {home}


@pytest.mark.parametrize(
    "case",
    [
        Case(world=2, device="cuda"),
        Case(world=2, device="cuda", sp=2, checkpointing=True),
        Case(world=2, device="cuda", sp=2, micro=MicroBatching(max_tokens=24)),
        Case(world=2, device="cuda", fsdp={"forward_prefetch": True, "fsdp_size": 1}),
        Case(world=2, device="cuda", fsdp={"param_offload": True, "optimizer_offload": True}),
        Case(world=2, device="cuda", fsdp={"offload_policy": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_that_share_the_gpu_train_as_one(
    case: Case, compute: torch.dtype, folder: Path, ranks: Ranks
) -> None:
    """Over gloo, which takes GPU tensors too: NCCL wants a GPU for each rank."""
    expected = cases.train(folder, Case(device="cuda", compute=compute))
    result = ranks.run(2, cases.train_only, folder, dataclasses.replace(case, compute=compute))[1]
    num_steps, tolerance = (3, 1e-5) if compute == torch.float32 else (1, 5e-3)
    np.testing.assert_allclose(result["steps"][:num_steps], expected["steps"][:num_steps], rtol=tolerance, atol=1e-5)
    for name, values in expected["outputs"].items():
        np.testing.assert_allclose(result["outputs"][name], values, atol=1e-5)
