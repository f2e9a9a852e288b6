"""Device memory: free memory, and peaks per phase."""

import pytest
import torch

from lockstep.utils.device import MemoryPeaks, free_memory

MB = 2**20


def test_no_peaks_without_cuda() -> None:
    peaks = MemoryPeaks(torch.device("cpu"))
    with peaks.phase("gen"):
        torch.zeros(1000)
    assert peaks.metrics() == {}


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.empty_cache()
    return torch.device("cuda")


@pytest.mark.gpu
def test_each_phase_has_its_own_peak_and_the_largest_is_kept(cuda: torch.device) -> None:
    before = torch.cuda.memory_allocated() / 2**30
    peaks = MemoryPeaks(cuda)
    for name, size in (("gen", 512), ("update", 256)):
        with peaks.phase(name):
            torch.empty(size * MB, dtype=torch.uint8, device=cuda)
    metrics = peaks.metrics()
    assert metrics["perf/max_memory_allocated_gb/gen"] == pytest.approx(before + 0.5)
    assert metrics["perf/max_memory_allocated_gb/update"] == pytest.approx(before + 0.25)
    assert metrics["perf/max_memory_allocated_gb"] >= before + 0.5
    assert metrics["perf/max_memory_reserved_gb"] >= metrics["perf/max_memory_allocated_gb"]


class Sleeping:
    def released_bytes(self) -> int:
        return 128 * MB


@pytest.mark.gpu
def test_released_memory_is_not_counted(cuda: torch.device) -> None:
    before, peaks = torch.cuda.memory_allocated() / 2**30, MemoryPeaks(cuda)
    engine: Sleeping | None = Sleeping()
    peaks.subtract(engine.released_bytes)
    for _ in range(2):
        with peaks.phase("gen"):
            torch.empty(512 * MB, dtype=torch.uint8, device=cuda)
        expected = before + (0.375 if engine is not None else 0.5)
        assert peaks.metrics()["perf/max_memory_allocated_gb/gen"] == pytest.approx(expected)
        engine = None  # not kept alive


@pytest.mark.gpu
def test_memory_held_by_a_cuda_graph_is_not_free(cuda: torch.device) -> None:
    whole = free_memory(cuda)
    kept = torch.empty(64 * MB, dtype=torch.uint8, device=cuda)
    assert whole - free_memory(cuda) == pytest.approx(64 * MB, abs=4 * MB)
    del kept
    assert free_memory(cuda) == pytest.approx(whole, abs=4 * MB)  # cached by torch, so still available
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(128 * MB, dtype=torch.uint8, device=cuda).fill_(1)
    assert whole - free_memory(cuda) >= 128 * MB
