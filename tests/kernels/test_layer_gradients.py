"""Layer kernels with gradients: values equal to the rollout's kernels, gradients against double precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels import gated, head, layer_gradients, norms  # noqa: E402
from lockstep.kernels import rotary as rotation  # noqa: E402
from lockstep.kernels.gated import Activation  # noqa: E402
from lockstep.kernels.joined import joined  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def lay_side_by_side(leaves: list[Tensor]) -> None:
    if leaves:
        together = torch.cat([t.data for t in leaves])
        for tensor, part in zip(leaves, together.split([len(t) for t in leaves])):
            tensor.data = part
        joint = joined(leaves)
        assert joint is not None and joint.data_ptr() == leaves[0].data_ptr() and torch.equal(joint, together)


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def check_gradients(outs: list[Tensor], exact: list[Tensor], leaves: list[Tensor], exact_leaves: list[Tensor]) -> None:
    """Back through both with the same gradient; the leaves' gradients agree up to the type's rounding."""
    bound = 1e-5 if leaves[0].dtype == torch.float32 else 1e-2
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    torch.autograd.backward(exact, [g.double() for g in grads])
    for got, true in [*zip(outs, exact), *((a.grad, b.grad) for a, b in zip(leaves, exact_leaves))]:
        assert got is not None and true is not None
        assert float((got.detach().double() - true.detach()).norm() / true.detach().norm()) < bound


def activate(x: Tensor, activation: Activation) -> Tensor:
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("shape", [(1, 300, 96), (5, 896), (1, 6, 3, 64)])
def test_rms_norm(dtype: torch.dtype, offset: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=dtype)
    y, w = doubles(x, weight)
    out = layer_gradients.rms_norm(x, weight, 1e-5, offset=offset)
    assert torch.equal(out, norms.rms_norm(x, weight, 1e-5, offset=offset))
    exact = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * (w + offset)
    check_gradients([out], [exact], [x, weight], [y, w])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_product_of_halves(dtype: torch.dtype, activation: Activation) -> None:
    torch.manual_seed(0)
    both = leaf(1, 5, 2 * 1100, dtype=dtype)
    (exact_both,) = doubles(both)
    gate, up = both.chunk(2, -1)
    out = layer_gradients.gated_product(gate, up, activation)
    assert torch.equal(out, gated.gated_product(gate, up, activation))
    exact_gate, exact_up = exact_both.chunk(2, -1)
    check_gradients([out], [activate(exact_gate, activation) * exact_up], [both], [exact_both])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_norm_of_a_wide_stream(dtype: torch.dtype, offset: bool) -> None:
    torch.manual_seed(0)
    stream, weight = leaf(1, 300, 96, dtype=torch.float32), leaf(96, dtype=dtype)
    y, w = doubles(stream, weight)
    outs = layer_gradients.stream_norm(stream, weight, 1e-5, offset=offset)
    assert [out.dtype for out in outs] == [dtype, torch.float32]
    assert torch.equal(outs[1], stream) and outs[1].data_ptr() != stream.data_ptr()
    exact = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * (w + offset)
    check_gradients(list(outs), [exact, 1.0 * y], [weight, stream], [w, y])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("with_stream", [False, True])
@pytest.mark.parametrize("adjacent", [False, True])
def test_gated_mlp(dtype: torch.dtype, activation: Activation, with_stream: bool, adjacent: bool) -> None:
    torch.manual_seed(0)
    leaves = [leaf(*s, dtype=dtype) for s in ((1, 70, 48), (136, 48), (136, 48), (48, 136))]
    if adjacent:
        lay_side_by_side(leaves[1:3])
    stream = leaf(1, 70, 48, dtype=torch.float32)
    exact_leaves, (exact_stream,) = doubles(*leaves), doubles(stream)
    out = layer_gradients.gated_mlp(*leaves, activation, stream.clone() if with_stream else None)
    x, gate, up, down = exact_leaves
    exact = F.linear(activate(F.linear(x, gate), activation) * F.linear(x, up), down)
    if not with_stream:
        check_gradients([out], [exact], leaves, exact_leaves)
        return
    assert out.dtype == torch.float32
    check_gradients([out], [exact + exact_stream], [*leaves, stream], [*exact_leaves, exact_stream])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stream, x, weight = leaf(1, 70, 48, dtype=torch.float32), leaf(1, 70, 32, dtype=dtype), leaf(48, 32, dtype=dtype)
    exact_stream, exact_x, exact_weight = doubles(stream, x, weight)
    out = layer_gradients.add_product(stream.clone(), x, weight)
    with torch.no_grad():
        assert torch.equal(out, head.add_product(stream.clone(), x, weight))
    exact = exact_stream + F.linear(exact_x, exact_weight)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    check_gradients([out], [exact], [x, weight, stream], [exact_x, exact_weight, exact_stream])


@pytest.mark.parametrize("shape", [(2, 64), (3, 40), (600,)])
def test_rows_taken_many_times(shape: tuple[int, ...]) -> None:
    """The gradient of a row that went to many places is rounded once, not at each addition."""
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    torch.manual_seed(0)
    x = leaf(7, *shape, dtype=half)
    index = torch.tensor([5, 0, 0, 6, 3, *[2] * 40, 0], device=DEVICE)
    out = layer_gradients.take_rows(x, layer_gradients.RowIndex(index, len(x)))
    assert torch.equal(out, x[index])
    grad = torch.randn(out.shape, device=DEVICE).to(half)
    out.backward(grad)
    exact = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE).index_add(0, index, grad.double())
    torch.testing.assert_close(x.grad, exact.to(half), rtol=1e-5 if half == torch.float32 else 2**-8, atol=1e-5)


@pytest.mark.parametrize("padding", [None, 3])
def test_wide_embedding(padding: int | None) -> None:
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    torch.manual_seed(0)
    plain = torch.nn.Embedding(20, 48, padding_idx=padding, dtype=torch.float64, device=DEVICE)
    weight = torch.nn.Parameter(plain.weight.detach().to(half))
    weight.grad_dtype = torch.float32
    plain.weight.data = weight.detach().double()
    ids = torch.tensor([[3, 0, 19, 3, 3, 5, 0]], device=DEVICE)
    out = layer_gradients.embed_wide(ids, weight, padding)
    assert out.dtype == torch.float32 and torch.equal(out, plain(ids).float())
    grad = torch.randn(out.shape, device=DEVICE)
    out.backward(grad)
    plain(ids).backward(grad.double())
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad.double(), plain.weight.grad, rtol=1e-5, atol=1e-5)


def test_gradients_in_the_type_in_which_they_are_summed() -> None:
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    x, stream = leaf(1, 70, 32, dtype=half), leaf(1, 70, 48, dtype=torch.float32)
    weight = torch.nn.Parameter(torch.randn(48, 32, device=DEVICE).to(half))
    weight.grad_dtype = torch.float32
    grad = torch.randn(1, 70, 48, device=DEVICE)
    layer_gradients.add_product(stream.clone(), x, weight).backward(grad)
    exact = grad.to(half)[0].double().T @ x[0].detach().double()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad.double(), exact, rtol=1e-4, atol=1e-4)


def test_gated_mlp_with_frozen_weights() -> None:
    x, *weights = (leaf(*s, dtype=torch.float32) for s in ((3, 8), (16, 8), (16, 8), (8, 16)))
    for weight in weights[:2]:
        weight.requires_grad_(False)
    layer_gradients.gated_mlp(x, *weights, "silu").sum().backward()
    assert [w.grad is None for w in weights] == [True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k = leaf(1, 9, 5, 24, dtype=dtype), leaf(1, 9, 2, 24, dtype=dtype)
    exact_q, exact_k = doubles(q, k)
    cos, sin = (torch.randn(1, 9, 24, device=DEVICE).to(dtype) for _ in range(2))
    outs = layer_gradients.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for got, same in zip(outs, rotation.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)):
        assert torch.equal(got, same)
    exact = []
    for x in (exact_q.transpose(1, 2), exact_k.transpose(1, 2)):
        turned = torch.cat((-x[..., 12:], x[..., :12]), -1)
        exact.append(x * cos.double()[:, None] + turned * sin.double()[:, None])
    check_gradients(list(outs), exact, [q, k], [exact_q, exact_k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("adjacent", [False, True])
def test_joint_linear(dtype: torch.dtype, biased: bool, adjacent: bool) -> None:
    torch.manual_seed(0)
    x, *weights = (leaf(*s, dtype=dtype) for s in ((1, 70, 48), (64, 48), (16, 48), (16, 48)))
    biases = [leaf(len(w), dtype=dtype) if biased else None for w in weights]
    if adjacent:
        lay_side_by_side(weights)
        lay_side_by_side([b for b in biases if b is not None])
    leaves = [x, *weights, *(b for b in biases if b is not None)]
    exact_x, *exact = doubles(*leaves)
    outs = layer_gradients.joint_linear(x, weights, biases)
    exact_biases = exact[3:] if biased else [None] * 3
    exact_outs = [F.linear(exact_x, w, b) for w, b in zip(exact, exact_biases)]
    check_gradients(list(outs), exact_outs, leaves, [exact_x, *exact])


def test_joint_linear_of_which_one_is_trained() -> None:
    x, *weights = (leaf(*s, dtype=torch.float32) for s in ((3, 8), (4, 8), (4, 8), (4, 8)))
    for weight in (weights[0], weights[2]):
        weight.requires_grad_(False)
    sum(out.sum() for out in layer_gradients.joint_linear(x, weights, [None] * 3)).backward()  # type: ignore[union-attr]
    assert [w.grad is None for w in weights] == [True, False, True]
