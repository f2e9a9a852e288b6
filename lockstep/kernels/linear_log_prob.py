"""Statistics of softmax(head(hidden)), one chunk of positions at a time: the full logits never exist.

    forward:   hidden (C, H) ─► logits (C, V) float32 ─► one pass: log p[target], log-sum-exp, entropy, Σ p²
    backward:  logits again ─► one pass: their gradient in half precision ─► hidden's (C, H), weight's (V, H) and bias's (V)

If memory allows, the forward keeps exp(l - m) of a chunk in half precision, with m the largest logit so far, and the backward
turns it into the gradient in place instead of multiplying again. The target's own probability comes from its log-prob.

The weight's gradient is summed over chunks in float32. The logits are

    l = bound(factor * (hidden @ weight.T + bias)) / temperature,  bound(z) = cap * tanh(z / cap) if there is a cap
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.activation_memory import HEAD_CHUNK, HEAD_KEEPS
from lockstep.kernels.exact import exact_product, is_exact

BLOCK = 4096
"""Vocabulary entries per iteration of a program."""


@dataclass(frozen=True)
class LogitForm:
    """How logits come from the head's product: temperature divides, factor multiplies, cap bounds (None: unbounded)."""

    temperature: float = 1.0
    factor: float = 1.0
    cap: float | None = None


@triton.jit
def _form(
    z, bias_ptr, at, inside, factor, cap,
    BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The logit before the temperature, and its derivative by the head's product."""
    if BIAS:
        z += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    z = z * factor
    slope = z * 0.0 + factor
    if CAP:
        bounded = 1.0 - 2.0 / (tl.exp(2.0 * z / cap) + 1.0)
        z = cap * bounded
        slope = factor * (1.0 - bounded * bounded)
    return z, slope


@triton.jit
def _statistics(
    z_ptr, bias_ptr, targets_ptr, temperatures_ptr, log_prob_ptr, total_ptr, entropy_ptr, squares_ptr, kept_ptr, tops_ptr,
    vocabulary, factor, cap, temperature,
    BIAS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * vocabulary
    target = tl.load(targets_ptr + row)
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
    top = tl.full([], -1.0e30, tl.float32)
    total = tl.zeros([], tl.float32)  # Σ exp(l - top)
    mean = tl.zeros([], tl.float32)  # Σ (l - top) exp(l - top)
    squares = tl.zeros([], tl.float32)  # Σ exp(l - top)²
    chosen = tl.zeros([], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocabulary
        z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        logit, _ = _form(z, bias_ptr, at, inside, factor, cap, BIAS, CAP)
        logit = logit / temperature
        chosen += tl.sum(tl.where(at == target, logit, 0.0), 0)
        top_new = tl.maximum(top, tl.max(tl.where(inside, logit, -1.0e30), 0))
        gap = logit - top_new
        weight = tl.where(inside, tl.exp(gap), 0.0)
        if kept_ptr is not None:
            tl.store(kept_ptr + row * vocabulary + at, weight.to(kept_ptr.dtype.element_ty), mask=inside)
            tl.store(tops_ptr + row * tl.cdiv(vocabulary, BLOCK) + start // BLOCK, top_new)
        shrink = tl.exp(top - top_new)
        mean = shrink * (mean + (top - top_new) * total) + tl.sum(gap * weight, 0)
        total = shrink * total + tl.sum(weight, 0)
        squares = shrink * shrink * squares + tl.sum(weight * weight, 0)
        top = top_new
    tl.store(log_prob_ptr + row, chosen - top - tl.log(total))
    tl.store(total_ptr + row, top + tl.log(total))
    tl.store(entropy_ptr + row, tl.log(total) - mean / total)
    tl.store(squares_ptr + row, squares / (total * total))


@triton.jit
def _gradient(
    z_ptr, tops_ptr, bias_ptr, targets_ptr, log_prob_ptr, total_ptr, entropy_ptr, squares_ptr, by_log_prob_ptr,
    by_entropy_ptr, by_squares_ptr, out_ptr, vocabulary, factor, cap, temperature,
    BIAS: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d log p[y] / d l = 1[y] - p;  d entropy / d l = -p (log p + entropy);  d Σp² / d l = 2 p (p - Σp²).

    z_ptr: the head's products or, if there are tops, exp(l - top) kept by the forward.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    z = tl.load(z_ptr + row * vocabulary + at, mask=inside, other=0.0).to(tl.float32)
    is_target = at == tl.load(targets_ptr + row)
    if tops_ptr is not None:
        slope = factor
        top = tl.load(tops_ptr + row * tl.num_programs(1) + tl.program_id(1))
        p = z * tl.exp(top - tl.load(total_ptr + row))
        p = tl.where(is_target, tl.exp(tl.load(log_prob_ptr + row)), p)
        log_p = tl.log(tl.maximum(p, 1.0e-37))
    else:
        logit, slope = _form(z, bias_ptr, at, inside, factor, cap, BIAS, CAP)
        log_p = logit / temperature - tl.load(total_ptr + row)
        p = tl.exp(log_p)
    grad = tl.load(by_log_prob_ptr + row) * (tl.where(is_target, 1.0, 0.0) - p)
    if ENTROPY:
        grad -= tl.load(by_entropy_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    if SQUARES:
        grad += tl.load(by_squares_ptr + row) * 2.0 * p * (p - tl.load(squares_ptr + row))
    grad = grad * slope / temperature
    tl.store(out_ptr + row * vocabulary + at, grad.to(out_ptr.dtype.element_ty), mask=inside)


class _Kept(NamedTuple):
    """What a chunk keeps: exp(l - top) (C, V), and the top of each block (C, V / BLOCK)."""

    weights: Tensor
    tops: Tensor


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: LogitForm, room: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_prob, total, entropy, squares = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(4))
        ctx.kept = []
        for rows in _chunks(hidden, weight):
            z = exact_product(hidden[rows], weight, torch.float32) if is_exact() else _product(hidden[rows], weight.t())
            room -= z.numel() * weight.element_size()
            # what stores more has another layout, and sums in another order
            keeps = room >= 0 and form.cap is None and not is_exact()
            kept = _room_for(z, weight.dtype) if keeps else None
            _statistics[(len(z),)](
                *(z, bias, targets[rows], None, log_prob[rows], total[rows], entropy[rows], squares[rows]),
                *(kept or (None, None)),
                *(z.shape[1], *_scalars(form), bias is not None, form.cap is not None, BLOCK),
                num_warps=8,
            )
            del z
            ctx.kept.append(kept)
        ctx.save_for_backward(hidden, weight, bias, targets, log_prob, total, entropy, squares)
        ctx.form = form
        ctx.set_materialize_grads(False)
        return log_prob, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *statistics = ctx.saved_tensors
        form: LogitForm = ctx.form
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        by_log_prob, by_entropy, by_squares = (None if g is None else g.contiguous() for g in grads)
        if by_log_prob is None:
            by_log_prob = torch.zeros_like(statistics[0])
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = grad_bias = None
        for number, rows in enumerate(_chunks(hidden, weight)):
            kept: _Kept | None = ctx.kept[number]
            ctx.kept[number] = None  # becomes the gradient
            z = _product(hidden[rows], weight.t()) if kept is None else kept.weights
            grad = torch.empty_like(z, dtype=weight.dtype) if kept is None else z
            _gradient[(len(z), triton.cdiv(z.shape[1], BLOCK))](
                *(z, None if kept is None else kept.tops, bias, targets[rows]),
                *(values[rows] for values in statistics),
                *(None if values is None else values[rows] for values in (by_log_prob, by_entropy, by_squares)),
                *(grad, z.shape[1], *_scalars(form), bias is not None, form.cap is not None),
                *(by_entropy is not None, by_squares is not None, BLOCK),
                num_warps=8,
            )
            del z, kept
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if wants_weight:
                grad_weight = _product(grad.t(), hidden[rows], grad_weight)
            if wants_bias:
                part = grad.sum(0, dtype=torch.float32)
                grad_bias = part if grad_bias is None else grad_bias + part
            del grad
        if wants_weight and grad_weight is None:  # no place at all
            grad_weight = torch.zeros_like(weight)
        if wants_bias and grad_bias is None:
            grad_bias = torch.zeros_like(bias)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def linear_log_prob(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: LogitForm
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (N, H), weight (V, H), bias (V), targets (N) -> log p[target], entropy, Σ p² (N) in float32.

    All three come from one pass; only the gradients that are needed are computed.
    """
    is_trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    out: tuple[Tensor, Tensor, Tensor] = _LinearLogProb.apply(
        hidden.contiguous(), weight, bias, targets.contiguous(), form, _room(hidden.device) if is_trained else 0
    )
    return out


def row_log_probs(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """log softmax(logits / temperature)[target] (N), by the kernel of `linear_log_prob`: in exact mode to the same bits.

    logits (N, V) in float32, targets and temperatures (N).
    """
    log_prob, *others = (logits.new_empty(len(logits)) for _ in range(4))
    _statistics[(len(logits),)](
        *(logits, None, targets, temperatures, log_prob, *others, None, None),
        *(logits.shape[1], *_scalars(LogitForm()), False, False, BLOCK),
        num_warps=8,
    )
    return log_prob


def _room(device: torch.device) -> int:
    """Bytes that may be kept for the backward."""
    if device.type != "cuda":
        return HEAD_CHUNK
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(HEAD_KEEPS * free)


def _room_for(z: Tensor, dtype: torch.dtype) -> _Kept:
    tops = z.new_empty(len(z), triton.cdiv(z.shape[1], BLOCK), dtype=torch.float32)
    return _Kept(torch.empty_like(z, dtype=dtype), tops)


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Equal pieces of the positions, each with at most `HEAD_CHUNK` logits; none if there is no position."""
    number = triton.cdiv(len(hidden) * len(weight), HEAD_CHUNK)
    if number == 0:
        return []
    size = triton.cdiv(triton.cdiv(len(hidden), number), 64) * 64  # whole tiles of the matrix product
    return [slice(i, min(i + size, len(hidden))) for i in range(0, len(hidden), size)]


def _scalars(form: LogitForm) -> tuple[float, float, float]:
    return form.factor, 1.0 if form.cap is None else form.cap, form.temperature


def _product(a: Tensor, b: Tensor, add_to: Tensor | None = None) -> Tensor:
    """a @ b (+ add_to, in place) in float32; inputs in half precision on CUDA are multiplied as they are."""
    if not (a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)):
        product = (a @ b).float()
        return product if add_to is None else add_to.add_(product)
    if add_to is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(add_to, a, b, out_dtype=torch.float32, out=add_to)
