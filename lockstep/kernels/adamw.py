"""Triton kernel of AdamW on bfloat16 weights and moments: computed in float32, rounded stochastically, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _round(x, bits):
    """float32 to bfloat16, up or down so that the expectation is x; bits: the lower 16 are added below the last bit of bfloat16."""
    return (
        ((x.to(tl.int32, bitcast=True) + (bits & 65535).to(tl.int32)) & -65536)
        .to(tl.float32, bitcast=True)
        .to(tl.bfloat16)
    )


@triton.jit(do_not_specialize=["size", "seed"])
def _adamw(
    weight_ptr, grad_ptr, mean_ptr, square_ptr, scale_ptr, size, seed,
    beta1, beta2, eps, step_size, root_correction, decay, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        grad = grad / tl.load(scale_ptr)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(square_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mean = mean + (grad - mean) * (1.0 - beta1)
    square = square * beta2 + grad * grad * (1.0 - beta2)
    weight = weight * decay - step_size * mean / (tl.sqrt(square) / root_correction + eps)
    first, second, _, _ = tl.randint4x(seed, at)
    tl.store(weight_ptr + at, _round(weight, first), mask=inside)
    tl.store(mean_ptr + at, _round(mean, first >> 16), mask=inside)
    tl.store(square_ptr + at, _round(square, second), mask=inside)


def adamw(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scale: Tensor | None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    seed: int,
) -> None:
    """Update flat bfloat16 tensors in place. scale divides the gradient; the random bits follow the seed and the index."""
    beta1, beta2 = betas
    step_size, root_correction = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    _adamw[(triton.cdiv(len(weight), BLOCK),)](
        *(weight, grad, exp_avg, exp_avg_sq, scale, len(weight), seed),
        *(beta1, beta2, eps, step_size, root_correction, 1 - lr * weight_decay, BLOCK),
    )
