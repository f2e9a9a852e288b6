"""Products in 8 bits: rounding against a list of the type's numbers, products in double precision, CUDA against the reference."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lockstep.kernels import fp8
from lockstep.kernels.fp8 import Fp8Rows, fp8_linear, quantize
from lockstep.kernels.linear import add_linear, gated_linear, joint_linear, set_fp8_weight

CUDA = pytest.mark.gpu


def numbers_of_e4m3() -> Tensor:
    """All finite values: 4 bits of exponent with bias 7, 3 of mantissa; the largest pattern is NaN."""
    normal = [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    positive = [m / 8 * 2.0**-6 for m in range(1, 8)] + normal
    return torch.tensor([*(-x for x in reversed(positive)), 0.0, *positive], dtype=torch.float64)


def rounded(x: Tensor) -> Tensor:
    """x (N, K) as it is in 8 bits, in double precision. Of two nearest numbers it is the one with an even mantissa."""
    scales = (x.float().abs().amax(1, keepdim=True) * (1 / 448)).clamp_min(1e-12)
    numbers = numbers_of_e4m3()
    is_odd = (torch.arange(len(numbers)) - len(numbers) // 2) % 2
    distance = (x.float() / scales).double()[..., None].sub(numbers).abs()
    return numbers[(distance + 1e-9 * numbers.abs() * is_odd).argmin(-1)] * scales


def test_rows_are_rounded_to_the_nearest_number_of_the_type() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 40) * torch.logspace(-6, 4, 6)[:, None]
    x[2] = 0.0
    rows = quantize(x)
    assert rows.values.dtype == torch.float8_e4m3fn and rows.scales.shape == (6,)
    torch.testing.assert_close(rows.dequantized().double(), rounded(x), rtol=1e-5, atol=0)
    error = (rows.dequantized() - x).abs()
    assert (error <= x.abs() / 16 + rows.scales[:, None] / 1024 * 1.001).all()  # half a step, also of subnormals
    assert (rows.values.float().abs().amax(1) == torch.tensor([448.0, 448, 0, 448, 448, 448])).all()
    place = fp8.empty_rows(6, 40, x.device)
    assert quantize(x, place) is place and torch.equal(place.dequantized(), rows.dequantized())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(2, 3, 48).to(dtype), torch.randn(20, 48).to(dtype), torch.randn(20).to(dtype)
    expected = F.linear(rounded(x.flatten(0, 1)), rounded(weight), bias.double()).view(2, 3, 20)
    got = fp8_linear(x, quantize(weight), bias)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.05)
    relative = (got.double() - F.linear(x.double(), weight.double(), bias.double())).norm() / got.double().norm()
    assert 0.01 < relative < 0.06  # what 8 bits cost


def test_the_layers_products_take_the_copy_unless_gradients_are_computed() -> None:
    torch.manual_seed(2)
    layers = nn.ModuleList([nn.Linear(32, 16), nn.Linear(32, 8), nn.Linear(8, 32, False)])
    adapters = inject_adapter_in_model(LoraConfig(r=4, target_modules=["1"], init_lora_weights=False), layers)
    modules = [adapters[0], adapters[1]]
    linears, down = [layers[0], adapters[1].base_layer], layers[2]
    x, stream = torch.randn(5, 32), torch.randn(5, 32)
    plain = joint_linear(x, modules)
    for linear in (*linears, down):
        set_fp8_weight(linear, quantize(linear.weight.detach()))
    torch.testing.assert_close(joint_linear(x, modules), plain)  # gradients are on
    with torch.no_grad():
        lora = adapters[1](x) - adapters[1].base_layer(x)
        base = [F.linear(rounded(x), rounded(linear.weight), linear.bias.double()) for linear in linears]
        expected = torch.cat([base[0], base[1] + lora.double()], -1)
        torch.testing.assert_close(joint_linear(x, modules).double(), expected, rtol=0, atol=1e-4)
        narrow = torch.randn(5, 16)
        product = F.silu(narrow[:, :8]) * narrow[:, 8:]
        expected = F.linear(rounded(product), rounded(down.weight))
        torch.testing.assert_close(gated_linear(narrow, down, "silu").double(), expected, rtol=0, atol=1e-4)
        added = [add_linear(stream.clone(), product, down), gated_linear(narrow, down, "silu", stream.clone())]
        for got in added:
            torch.testing.assert_close(got.double(), stream + expected, rtol=0, atol=1e-4)
        set_fp8_weight(linears[0], None)  # all of a product's layers, or none
        torch.testing.assert_close(joint_linear(x, modules), plain)


@pytest.fixture
def cuda() -> torch.device:
    if not fp8.has_fp8_products(torch.device("cuda", 0)) if torch.cuda.is_available() else True:
        pytest.skip("needs a CUDA device with 8-bit products")
    return torch.device("cuda", 0)


@CUDA
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 100), (256, 3584), (64, 18944)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_like_the_reference(rows: int, width: int, dtype: torch.dtype, cuda: torch.device) -> None:
    torch.manual_seed(3)
    x = (torch.randn(rows, width + 8, device=cuda) * 3).to(dtype)[:, :width]
    x[0] = 0.0
    expected = fp8.empty_rows(rows, width, cuda)
    fp8.quantize_reference(x, expected)
    got = quantize(x)
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))


@CUDA
@pytest.mark.parametrize("rows", [1, 7, 256, 4096])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_tensor_cores_form_equals_the_reference(rows: int, has_bias: bool, cuda: torch.device) -> None:
    torch.manual_seed(4)
    x = torch.randn(rows, 3584, device=cuda).bfloat16()
    weight = quantize(torch.randn(4608, 3584, device=cuda).bfloat16() / 60)
    bias = torch.randn(4608, device=cuda).bfloat16() if has_bias else None
    expected = fp8.fp8_linear_reference(quantize(x), weight, bias)
    error = (fp8_linear(x, weight, bias).float() - expected).abs().max() / expected.abs().max()
    assert error < 0.01  # rounding to bfloat16, and the accumulator of the tensor cores
    odd = Fp8Rows(weight.values[:13], weight.scales[:13])
    torch.testing.assert_close(fp8_linear(x, odd), fp8.fp8_linear_reference(quantize(x), odd).bfloat16())
