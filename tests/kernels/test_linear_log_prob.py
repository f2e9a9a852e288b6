"""Fused statistics of a head's distributions and their gradients against double precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels.linear_log_prob import LogitForm, linear_log_prob  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
FORMS = [LogitForm(), LogitForm(temperature=0.7), LogitForm(temperature=1.3, factor=0.5, cap=2.0)]


def make(places: int, dtype: torch.dtype, *, bias: bool, vocabulary: int = 5000, width: int = 64) -> list[Any]:
    torch.manual_seed(places)
    hidden, weight = torch.randn(places, width), torch.randn(vocabulary, width) / 4
    tensors = [hidden, weight, torch.randn(vocabulary) if bias else None]
    tensors = [None if t is None else t.to(DEVICE, dtype).requires_grad_() for t in tensors]
    return [*tensors, torch.randint(0, vocabulary, (places,), device=DEVICE)]


def exact(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: LogitForm) -> list[Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits * form.factor
    logits = (logits if form.cap is None else torch.tanh(logits / form.cap) * form.cap) / form.temperature
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    return [log_p.gather(1, targets[:, None])[:, 0], -(p * log_p).sum(-1), (p**2).sum(-1)]


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk, num_kept", [(None, 1), (64 * 5000, 3), (64 * 5000, 1), (64 * 5000, 0)])
def test_values_and_gradients_equal_double_precision(
    dtype: torch.dtype,
    form: LogitForm,
    bias: bool,
    chunk: int | None,
    num_kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = (chunk or 130 * 5000) * num_kept * dtype.itemsize
    monkeypatch.setattr("lockstep.kernels.linear_log_prob._room", lambda device: room)
    if chunk is not None:
        monkeypatch.setattr("lockstep.kernels.linear_log_prob.HEAD_CHUNK", chunk)
    *tensors, targets = make(130, dtype, bias=bias)
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    expected = exact(*doubles, targets, form)  # type: ignore[arg-type]
    got = linear_log_prob(*tensors, targets, form)
    weights = torch.randn(3, 130, device=DEVICE)
    for value, true in zip(got, expected):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), true, rtol=2e-5, atol=2e-5)
    sum((w * v).sum() for w, v in zip(weights, got)).backward()  # type: ignore[union-attr]
    sum((w.double() * v).sum() for w, v in zip(weights, expected)).backward()  # type: ignore[union-attr]
    for tensor, double in zip(tensors, doubles):
        if tensor is not None:
            assert tensor.grad.dtype == dtype
            assert distance(tensor.grad, double.grad) < (1e-5 if dtype == torch.float32 else 4e-3)


def test_a_second_backward_computes_again_what_the_first_used_up() -> None:
    *tensors, targets = make(7, torch.float32, bias=False)
    out = linear_log_prob(*tensors, targets, LogitForm())[0].sum()
    first, second = (torch.autograd.grad(out, tensors[:2], retain_graph=True) for _ in range(2))
    for a, b in zip(first, second):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_one_gradient_alone(needed: int) -> None:
    *tensors, targets = make(7, torch.float32, bias=True)
    linear_log_prob(*tensors, targets, LogitForm())[0].sum().backward()
    alone = [t.detach().clone().requires_grad_(i == needed) for i, t in enumerate(tensors)]
    linear_log_prob(*alone, targets, LogitForm())[0].sum().backward()
    for i, (part, whole) in enumerate(zip(alone, tensors)):
        torch.testing.assert_close(part.grad, whole.grad) if i == needed else None
        assert (part.grad is None) == (i != needed)


def test_entropy_alone() -> None:
    *tensors, targets = make(7, torch.float32, bias=False)
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    linear_log_prob(*tensors, targets, LogitForm())[1].sum().backward()
    exact(*doubles, targets, LogitForm())[1].sum().backward()  # type: ignore[arg-type]
    assert distance(tensors[0].grad, doubles[0].grad) < 1e-5  # type: ignore[union-attr]


def test_no_place_leaves_the_graph_whole() -> None:
    *tensors, targets = make(0, torch.float32, bias=True)
    log_probs, entropy, squares = linear_log_prob(*tensors, targets, LogitForm())
    assert log_probs.shape == entropy.shape == squares.shape == (0,)
    log_probs.sum().backward()
    assert tensors[0].grad.shape == (0, 64)
    assert not tensors[1].grad.any() and not tensors[2].grad.any()


def test_weight_tied_to_an_embedding_gets_both_gradients() -> None:
    _, weight, _, targets = make(9, torch.float32, bias=False)
    double = weight.detach().double().requires_grad_()
    tokens = targets.flip(0)
    linear_log_prob(weight[tokens], weight, None, targets, LogitForm())[0].sum().backward()
    exact(double[tokens], double, None, targets, LogitForm())[0].sum().backward()
    assert distance(weight.grad, double.grad) < 1e-5
