"""Offloaded tensors come back as they were, and a streamed optimizer step equals one on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from lockstep.config.model import FSDPOptimizerConfig
from lockstep.engines.train import optimizer as optimizer_module
from lockstep.engines.train.lr_schedule import build_schedule, go_to_step
from lockstep.engines.train.offload import CopyStream, OffloadedMoments, PinnedBuffer, _copied, move_parameters
from lockstep.engines.train.optimizer import PiecewiseAdamW, build_optimizer
from lockstep.engines.train.state import load_shards, save_shards
from lockstep.kernels.packed import packed_view
from tests.engines.train import cases
from tests.engines.train.cases import CPU, Case
from tests.engines.train.ranks import Ranks
from tests.tiny import save_tiny_model

OPTIM = FSDPOptimizerConfig(lr=0.01, lr_scheduler_type="linear", total_training_steps=10)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def some_tensors(device: str = "cpu") -> list[Tensor]:
    """Two adjacent ones, a transposed one twice, and an empty one."""
    pair = torch.randn(5, 3, device=device).bfloat16()
    crossed = torch.randn(4, 7, device=device).t()
    return [pair[:2], pair[2:], crossed, crossed, torch.zeros(0, 3, device=device)]


def check_same(copies: list[Tensor], tensors: list[Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy.cpu(), tensor.cpu()) and copy.dtype == tensor.dtype
        assert copy.stride() == tensor.stride()
    assert packed_view(copies[:2]) is not None
    assert copies[2].data_ptr() == copies[3].data_ptr() != tensors[2].data_ptr()


def test_copies_keep_strides_and_shared_storage() -> None:
    tensors = some_tensors()
    copies = _copied(tensors, lambda storages: [storage.clone() for storage in storages])
    check_same(copies, tensors)

    def in_one(storages: list[Tensor]) -> list[Tensor]:
        memory = torch.zeros(4096, dtype=torch.uint8)
        return [memory[512 * i : 512 * i + len(s)].copy_(s) for i, s in enumerate(storages)]

    shared = _copied(tensors, in_one)
    check_same(shared, tensors)
    check_same(_copied(shared, lambda storages: [storage.clone() for storage in storages]), tensors)


def test_no_copy_if_the_tensors_are_there_already() -> None:
    tensors = some_tensors()
    buffer = PinnedBuffer()
    assert all(a is b for a, b in zip(buffer.moved(tensors, torch.device("cpu")), tensors))
    assert buffer.moved([], torch.device("cpu")) == []


def small_model(device: str, dtype: torch.dtype) -> nn.Module:
    """Tensors of 1 to 105 elements, one of them frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 15), nn.LayerNorm(15), nn.Linear(15, 3), nn.Linear(3, 1)).to(device, dtype)
    model[2].bias.requires_grad_(False)
    return model


class Run:
    """A model with its optimizer, whose moments are streamed or not."""

    def __init__(self, device: str, dtype: torch.dtype, *, streamed: bool, bucket_bytes: int = 600) -> None:
        self.model = small_model(device, dtype)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = build_optimizer(trained, OPTIM, seed=5, in_pieces=streamed)
        self.optimizer, self.schedule = optimizer, build_schedule(optimizer, OPTIM)
        self.moments: OffloadedMoments | None = None
        if streamed:
            assert isinstance(optimizer, PiecewiseAdamW)
            self.moments = OffloadedMoments(optimizer, torch.device(device), bucket_bytes)

    def step(self, number: int, found_inf: float = 0.0) -> None:
        parameter = next(self.model.parameters())
        torch.manual_seed(number)
        self.model(torch.randn(4, 7).to(parameter)).float().pow(2).sum().backward()
        self.optimizer.grad_scale = torch.tensor(1.5, device=parameter.device)  # type: ignore[attr-defined]
        self.optimizer.found_inf = torch.tensor(found_inf, device=parameter.device)  # type: ignore[attr-defined]
        (self.moments or self.optimizer).step()
        if self.moments is not None and not found_inf:
            assert all(p.grad is None for p in self.model.parameters())
        self.optimizer.zero_grad()
        self.schedule.step()

    def weights(self) -> list[Tensor]:
        return [p.detach().cpu().clone() for p in self.model.parameters()]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 600, 2**28])
def test_a_streamed_step_equals_one_on_the_device(
    device: str, dtype: torch.dtype, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "PIECE_SIZE", 32)
    plain = Run(device, dtype, streamed=False)
    streamed = Run(device, dtype, streamed=True, bucket_bytes=bucket_bytes)
    for number, found_inf in enumerate([1.0, 0.0, 0.0, 1.0, 0.0]):
        for run in (plain, streamed):
            run.step(number, found_inf)
    for a, b in zip(plain.weights(), streamed.weights()):
        assert torch.equal(a, b)
    states = zip(plain.optimizer.state.values(), streamed.optimizer.state.values(), strict=True)
    for expected, state in states:
        assert float(state["step"]) == float(expected["step"]) == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].device.type == "cpu" and state[name].is_pinned() == (device == "cuda")
            assert torch.equal(state[name], expected[name].cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_checkpoint_is_the_same_with_and_without_offload(
    device: str, before: bool, after: bool, tmp_path: Path
) -> None:
    first = Run(device, torch.float32, streamed=before)
    for number in range(2):
        first.step(number)
    save_shards(tmp_path, ("model", "optimizer"), first.model, first.optimizer)
    names = dcp.FileSystemReader(tmp_path / "shards").read_metadata().state_dict_metadata
    assert {f"optimizer.state.0.weight.{name}" for name in ("step", "exp_avg", "exp_avg_sq")} <= set(names)
    second = Run(device, torch.float32, streamed=after)
    if second.moments is not None:
        second.moments.create()
    load_shards(tmp_path, ("model", "optimizer"), second.model, second.optimizer)
    go_to_step(second.schedule, first.schedule.last_epoch)
    for state in second.optimizer.state.values():
        assert state["exp_avg"].device.type == ("cpu" if after else device)
    for run in (first, second):
        run.step(2)
    for a, b in zip(first.weights(), second.weights()):
        assert torch.equal(a, b)
    assert first.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]


def test_shards_are_streamed_saved_and_loaded_as_on_the_device(tmp_path: Path) -> None:
    folder, case, ranks = save_tiny_model(tmp_path / "model"), Case(world=2), Ranks()
    try:
        expected = ranks.run(2, cases.save_and_go_on, folder, case, tmp_path / "plain")
        result = ranks.run(2, streamed_shards, folder, case, tmp_path / "plain", tmp_path / "streamed")
        resumed = ranks.run(2, cases.load_and_go_on, folder, case, tmp_path / "streamed")
    finally:
        ranks.close()
    for rank in range(2):
        for weights in (result[rank], resumed[rank]["weights"]):
            for name, weight in expected[rank]["weights"].items():
                assert (weights[name] == weight).all(), name


def streamed_shards(folder: Path, case: Case, plain: Path, checkpoint: Path) -> dict[str, Any]:
    """Load a checkpoint into streamed moments, save it again, take a step."""
    engine = cases.build_engine(folder, case)
    assert engine.optimizer is not None
    engine.optimizer = build_optimizer(engine.optimizer.param_groups[0]["params"], cases.OPTIM, seed=0, in_pieces=True)
    engine.schedule = build_schedule(engine.optimizer, cases.OPTIM)
    assert isinstance(engine.optimizer, PiecewiseAdamW)
    engine._moments = OffloadedMoments(engine.optimizer, CPU, bucket_bytes=2**12)
    engine.load(plain)
    engine.save(checkpoint)
    cases.engine_step(engine, case, 1)
    return cases.weights_of(engine)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("param_offload", [False, True])
def test_the_engine_keeps_moments_in_pinned_memory(param_offload: bool, tmp_path: Path) -> None:
    fsdp = {"optimizer_offload": True, "param_offload": param_offload}
    case = Case(device="cuda", compute=torch.bfloat16, fsdp=fsdp)
    folder = save_tiny_model(tmp_path / "model")
    engine = cases.build_engine(folder, case)
    for number in range(2):
        cases.engine_step(engine, case, number)
    assert engine.optimizer is not None
    for state in engine.optimizer.state.values():
        assert state["exp_avg"].is_pinned() and state["exp_avg"].any()
    uninterrupted = cases.save_and_go_on(folder, case, tmp_path / "checkpoint")
    resumed = cases.load_and_go_on(folder, case, tmp_path / "checkpoint")
    assert resumed["learning_rate"] == uninterrupted["learning_rate"]
    assert resumed["step"] == pytest.approx(uninterrupted["step"], rel=1e-3)


@pytest.mark.gpu
@needs_gpu
def test_a_streamed_step_needs_three_buckets_on_the_device() -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    parameter = nn.Parameter(torch.zeros(2**27, device=cuda))
    optimizer = build_optimizer([parameter], OPTIM, seed=0, in_pieces=True)
    assert isinstance(optimizer, PiecewiseAdamW)
    moments = OffloadedMoments(optimizer, cuda, bucket_bytes=2**26)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        moments.step()
        assert torch.cuda.max_memory_allocated() - before < 3 * 2 * 2**26 + 2**20
        assert before - torch.cuda.memory_allocated() >= parameter.nbytes  # the gradient
    assert (optimizer.state[parameter]["exp_avg"] == optimizer.state[parameter]["exp_avg"][0]).all()


@pytest.mark.gpu
@needs_gpu
def test_there_and_back_twice() -> None:
    cuda, host = torch.device("cuda", torch.cuda.current_device()), torch.device("cpu")
    tensors = some_tensors("cuda")
    buffer, places = PinnedBuffer(), tensors
    for _ in range(2):
        places = buffer.moved(places, host)
        assert all(t.is_pinned() for t in places if t.numel())
        check_same(places, tensors)
        places = buffer.moved(places, cuda)
        check_same(places, tensors)


@pytest.mark.gpu
@needs_gpu
def test_weights_that_are_on_the_host_between_steps_train_the_same() -> None:
    cuda, host = torch.device("cuda", torch.cuda.current_device()), torch.device("cpu")
    results = []
    for offloaded in (False, True):
        run, buffer = Run("cuda", torch.float32, streamed=False), PinnedBuffer()
        for number in range(3):
            run.step(number)
            for device in (host, cuda) if offloaded else ():
                move_parameters(run.model, buffer, device)
                assert {p.device for p in run.model.parameters()} == {device}
        results.append(run.weights())
    for plain, moved in zip(*results):
        assert torch.equal(plain, moved)


@pytest.mark.gpu
@needs_gpu
def test_copies_on_a_side_stream_are_complete_after_wait() -> None:
    cuda, host = torch.device("cuda", torch.cuda.current_device()), torch.device("cpu")
    buffer, copies = PinnedBuffer(), CopyStream(cuda)
    values = torch.arange(2**26, device=cuda)  # 512 MB take some milliseconds
    [on_host] = buffer.moved([values], host)
    for _ in range(3):
        with copies.copying():
            [arrived] = buffer.moved([on_host], cuda)
        torch.ones(64, 64, device=cuda).square()
        copies.wait()
        assert torch.equal(arrived, values)
