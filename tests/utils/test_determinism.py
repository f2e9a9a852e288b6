"""Deterministic kernels are on while gradients are computed, and nowhere else."""

import os
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from lockstep.single_controller.environment import ProcessEnvironment
from lockstep.utils.determinism import deterministic_kernels, prepare_cublas


class Watched(torch.autograd.Function):
    """Notes whether torch was asked for deterministic kernels in its backward."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        Watched.seen.append(torch.are_deterministic_algorithms_enabled())
        return grad


@pytest.mark.parametrize("enabled", [True, False])
def test_a_backward_pass_inside(enabled: bool) -> None:
    Watched.seen.clear()
    x = torch.ones(2, requires_grad=True)
    loss = Watched.apply(x).sum()
    with deterministic_kernels(enabled):
        loss.backward()
    assert Watched.seen == [enabled]
    assert not torch.are_deterministic_algorithms_enabled()


def test_settings_are_restored_after_an_error() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(RuntimeError, match="stop"), deterministic_kernels(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            raise RuntimeError("stop")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_workspace_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    prepare_cublas()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    prepare_cublas()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_workers_of_a_cluster_that_runs_already_get_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("OF_THIS_PROCESS", "1")
    assert ProcessEnvironment.capture().variables == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
