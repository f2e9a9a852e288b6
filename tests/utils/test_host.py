"""Threads and matrix library of a process that computes on the CPU."""

import os
from collections.abc import Iterator

import pytest
import torch

from lockstep.utils import host


@pytest.fixture(autouse=True)
def _restore_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host, "_largest_model", 0)
    monkeypatch.setattr(host, "_DEFAULT", 3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_for(num_parameters: int) -> int:
    host.prepare_cpu_for(num_parameters)
    return torch.get_num_threads()


def test_one_thread_while_all_models_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_for(1000) == 1
    assert threads_for(host.SMALL_MODEL) == 3
    assert threads_for(1000) == 3


def test_the_users_number_of_threads_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_for(1000) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    assert threads_for(1000) == 2


def test_onednn_writes_no_profiles() -> None:
    assert os.environ["ONEDNN_JIT_PROFILE"] == "0"


@pytest.mark.parametrize(
    ("machine", "has_bfloat16", "num_parameters", "enabled"),
    [
        ("aarch64", False, host.SMALL_MODEL, False),
        ("aarch64", False, 1000, True),
        ("aarch64", True, host.SMALL_MODEL, True),
        ("x86_64", False, host.SMALL_MODEL, True),
    ],
)
def test_large_models_on_arm_without_bfloat16_are_computed_without_onednn(
    machine: str, has_bfloat16: bool, num_parameters: int, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    torch._C._set_mkldnn_enabled(True)
    host.prepare_cpu_for(num_parameters)
    assert torch.backends.mkldnn.enabled is enabled
