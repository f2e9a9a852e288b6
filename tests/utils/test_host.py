"""Threads of a process that computes on the CPU."""

from collections.abc import Iterator

import pytest
import torch

from lockstep.utils import host


@pytest.fixture(autouse=True)
def _threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host, "_largest_model", 0)
    monkeypatch.setattr(host, "_NUM_THREADS", 3)
    before = torch.get_num_threads()
    monkeypatch.setattr(host, "_num_set", before)
    yield
    torch.set_num_threads(before)


def threads(*, decoding: bool) -> int:
    host.take_threads(decoding=decoding)
    return torch.get_num_threads()


def test_small_models_alone_take_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    host.settle_on_host(1000)
    for _ in range(2):
        assert (threads(decoding=True), threads(decoding=False)) == (1, 2)
    host.settle_on_host(host.SMALL_MODEL)
    assert threads(decoding=True) == threads(decoding=False) == 3
    host.settle_on_host(1000)
    assert threads(decoding=True) == 3


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0")])
def test_threads_that_sleep_while_they_wait_are_not_used_for_small_models(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(name, value)
    assert threads(decoding=False) == 1


def test_the_users_number_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    assert threads(decoding=True) == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(5)
    assert threads(decoding=True) == threads(decoding=False) == 5
