"""Linear layers: values and gradients against double precision, the torch reference and the GPU form."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lockstep.kernels.linear import Activation, add_linear, gated_linear, joint_linear, linear_float32
from tests.kernels.gradient_check import check, doubles, leaf


def linear(inputs: int, outputs: int, dtype: torch.dtype, device: str, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias, device=device, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_joint_linear(bias: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = leaf(1, 70, 48, dtype=dtype, device=device)
    linears = [linear(48, outputs, dtype, device, bias) for outputs in (64, 16, 16)]
    leaves = [x, *(p for module in linears for p in module.parameters())]
    exact_x, *exact = doubles(*leaves)
    step = 2 if bias else 1
    pairs = [exact[i : i + step] for i in range(0, len(exact), step)]
    expected = torch.cat([F.linear(exact_x, *pair) for pair in pairs], -1)
    check([joint_linear(x, linears)], [expected], leaves, [exact_x, *exact])


def test_joint_linear_with_frozen_weights(device: str) -> None:
    x = leaf(3, 8, dtype=torch.float32, device=device)
    linears = [linear(8, 4, torch.float32, device) for _ in range(3)]
    for module in (linears[0], linears[2]):
        module.requires_grad_(False)
    joint_linear(x, linears).sum().backward()
    assert [module.weight.grad is None for module in linears] == [True, False, True]


class Halved(nn.Module):
    """Stands for an adapter around a linear layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) / 2
        return out


def test_wrapped_linears_are_called_as_modules(device: str) -> None:
    torch.manual_seed(0)
    x, stream = (leaf(1, 5, 8, dtype=torch.float32, device=device) for _ in range(2))
    first, second, down = (linear(8, 8, torch.float32, device) for _ in range(3))
    joint = joint_linear(x, [Halved(first), second])
    torch.testing.assert_close(joint, torch.cat((first(x) / 2, second(x)), -1))
    torch.testing.assert_close(add_linear(stream.clone(), x, Halved(down)), stream + down(x) / 2)
    gate, up = joint.chunk(2, -1)
    torch.testing.assert_close(gated_linear(joint, Halved(down), "silu"), down(F.silu(gate) * up) / 2)


def test_add_linear(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the reference rounds the product")
    stream, x = leaf(1, 70, 48, dtype=torch.float32, device=device), leaf(1, 70, 32, dtype=dtype, device=device)
    module = linear(32, 48, dtype, device)
    exact_stream, exact_x, exact_weight = doubles(stream, x, module.weight)
    out = add_linear(stream.clone(), x, module)
    exact = exact_stream + F.linear(exact_x, exact_weight)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    check([out], [exact], [x, module.weight, stream], [exact_x, exact_weight, exact_stream])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("with_stream", [False, True])
def test_gated_linear(activation: Activation, with_stream: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    gate_up, down = leaf(1, 70, 272, dtype=dtype, device=device), linear(136, 48, dtype, device)
    stream = leaf(1, 70, 48, dtype=torch.float32, device=device)
    exact_gate_up, exact_weight, exact_stream = doubles(gate_up, down.weight, stream)
    gate, up = exact_gate_up.chunk(2, -1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    exact = F.linear(gate * up, exact_weight)
    out = gated_linear(gate_up, down, activation, stream.clone() if with_stream else None)
    leaves, exact_leaves = [gate_up, down.weight], [exact_gate_up, exact_weight]
    if with_stream:
        assert out.dtype == torch.float32
        leaves, exact_leaves, exact = [*leaves, stream], [*exact_leaves, exact_stream], exact + exact_stream
    check([out], [exact], leaves, exact_leaves)


def adapted(module: nn.Linear, rank: int = 4) -> Any:
    """With a LoRA adapter of peft whose B is not zero."""
    holder = nn.ModuleDict({"linear": module})
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["linear"]), holder)
    layer: Any = holder["linear"]
    nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    return layer


def lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ weight.T + 2.0 * (x @ a.T) @ b.T


def parts(layer: Any) -> list[Tensor]:
    return [layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight]


@pytest.mark.parametrize("first_input", [False, True], ids=["inner", "first"])
def test_joint_linear_with_adapters(first_input: bool, dtype: torch.dtype, device: str) -> None:
    """One layer of three has no adapter; the input of a frozen model's first layer needs no gradient."""
    torch.manual_seed(0)
    x = leaf(1, 70, 48, dtype=dtype, device=device).requires_grad_(not first_input)
    q, k, v = (
        adapted(linear(48, 64, dtype, device)),
        linear(48, 16, dtype, device),
        adapted(linear(48, 16, dtype, device)),
    )
    k.requires_grad_(False)
    tensors = [x, *parts(q), k.weight, *parts(v)]
    exact = doubles(*tensors)
    expected = torch.cat((lora(exact[0], *exact[1:4]), exact[0] @ exact[4].T, lora(exact[0], *exact[5:8])), -1)
    trained = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    assert trained == ([] if first_input else [0]) + [2, 3, 6, 7]
    out = joint_linear(x, [q, k, v])
    check([out], [expected], [tensors[i] for i in trained], [exact[i] for i in trained])
    with torch.no_grad():
        torch.testing.assert_close(joint_linear(x, [q, k, v]), out.detach())
        q._disable_adapters = v._disable_adapters = True
        plain = joint_linear(x, [q.base_layer, k, v.base_layer])
        assert torch.equal(joint_linear(x, [q, k, v]), plain)


@pytest.mark.parametrize("with_stream", [False, True])
def test_residual_linears_with_adapters(with_stream: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the reference rounds the product")
    gate_up, x = leaf(1, 70, 272, dtype=dtype, device=device), leaf(1, 70, 136, dtype=dtype, device=device)
    stream, down = leaf(1, 70, 48, dtype=torch.float32, device=device), adapted(linear(136, 48, dtype, device))
    tensors = [gate_up, x, stream, *parts(down)]
    exact_gate_up, exact_x, exact_stream, *weights = exact = doubles(*tensors)
    gate, up = exact_gate_up.chunk(2, -1)
    expected = lora(F.silu(gate) * up, *weights)
    out = gated_linear(gate_up, down, "silu", stream.clone() if with_stream else None)
    trained = [0, 4, 5]
    if with_stream:
        out, expected = add_linear(out, x, down), expected + exact_stream + lora(exact_x, *weights)
        trained += [1, 2]
    check([out], [expected], [tensors[i] for i in trained], [exact[i] for i in trained])
    assert down.base_layer.weight.grad is None


def test_weight_gradients_have_the_dtype_of_their_accumulation(device: str) -> None:
    half = torch.bfloat16 if device == "cuda" else torch.float32
    x, stream = leaf(1, 70, 32, dtype=half, device=device), leaf(1, 70, 48, dtype=torch.float32, device=device)
    module = linear(32, 48, half, device)
    module.weight.grad_dtype = torch.float32
    grad = torch.randn(1, 70, 48, device=device)
    add_linear(stream.clone(), x, module).backward(grad)
    exact = grad.to(half)[0].double().T @ x[0].detach().double()
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32
    torch.testing.assert_close(module.weight.grad.double(), exact, rtol=1e-4, atol=1e-4)


def test_linear_float32(dtype: torch.dtype, device: str) -> None:
    x, weight = leaf(2, 3, 32, dtype=dtype, device=device), leaf(20, 32, dtype=dtype, device=device)
    out = linear_float32(x, weight)
    assert out.dtype == torch.float32
    exact_x, exact_weight = doubles(x, weight)
    if device == "cuda":
        torch.testing.assert_close(out.double(), exact_x @ exact_weight.T, rtol=1e-5, atol=1e-5)
    check([out], [exact_x @ exact_weight.T], [x, weight], [exact_x, exact_weight])
