"""Threads of a process that computes on the CPU."""

from collections.abc import Iterator

import pytest
import torch

from lockstep.utils import host


@pytest.fixture(autouse=True)
def _threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host, "_largest_model", 0)
    monkeypatch.setattr(host, "_NUM_THREADS", 2)
    before = torch.get_num_threads()
    monkeypatch.setattr(host, "_num_set", before)
    yield
    torch.set_num_threads(before)


def test_small_models_alone_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    host.settle_on_host(1000)
    assert torch.get_num_threads() == 1
    host.settle_on_host(host.SMALL_MODEL)
    assert torch.get_num_threads() == 2
    host.settle_on_host(1000)
    assert torch.get_num_threads() == 2


def test_the_users_number_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    host.settle_on_host(1000)
    assert torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(3)
    host.settle_on_host(1000)
    assert torch.get_num_threads() == 3
