"""AdamW on bfloat16 in one kernel: the expectation of the rounded result is the float32 update."""

import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels.adamw import adamw  # noqa: E402

pytestmark = pytest.mark.gpu
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def test_rounding_is_unbiased_and_repeats_with_the_seed() -> None:
    size = 1 << 14 if DEVICE.type == "cuda" else 1 << 12
    generator = torch.Generator().manual_seed(0)
    weight, grad, mean = (torch.randn((), generator=generator).expand(size).bfloat16().to(DEVICE) for _ in range(3))
    square = mean.square()
    scale = torch.tensor(2.0, device=DEVICE)
    results = []
    for seed in (1, 1, 2):
        tensors = [t.clone() for t in (weight, mean, square)]
        adamw(tensors[0], grad, tensors[1], tensors[2], scale, step=3, seed=seed, **SETTINGS)  # type: ignore[arg-type]
        results.append(tensors)
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1]))
    assert not torch.equal(results[0][0], results[2][0])

    g = grad[0].double() / 2
    new_mean = mean[0].double() * 0.9 + g * 0.1
    new_square = square[0].double() * 0.99 + g * g * 0.01
    spread = (new_square / (1 - 0.99**3)).sqrt() + 1e-8
    new_weight = weight[0].double() * (1 - 1e-4 * 0.1) - 1e-4 * new_mean / (1 - 0.9**3) / spread
    for got, exact in zip(results[0], (new_weight, new_mean, new_square)):
        values = got.unique()
        assert len(values) == 2  # the two neighbours in bfloat16
        spacing = float(values[1] - values[0])
        error = float(got.double().mean() - exact)
        assert abs(error) < 5 * spacing * 0.5 / size**0.5
